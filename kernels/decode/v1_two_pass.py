"""decode v1 in Numba: the equation, literally; one block per query head.

    attention = sum_t p_t v_t,   p_t = exp(S_t - m) / l,   S_t = scale q . k_t

    m = max_t S_t     l = sum_t exp(S_t - m)

The twin of `v1_two_pass.cu`: same arrays, same constants, same threads.
"""

import math

import numpy as np

from kvq.kernels.device import array_of, functions, x_and_s

PART = 8  # short sums, and their sum: rounding errors stay small


def kernels(c):
    """The kernel as a plain function, by name."""
    from numba import cuda, float32, int64

    f = functions(c.S)
    ceil_div, read_code, code_offset, affine = (
        f.ceil_div,
        f.read_code,
        f.code_offset,
        f.affine,
    )
    NOTHING = float32(-np.inf)

    @cuda.jit(device=True)
    def side(arrays, head, T_cap, R_cap, D, scheme):
        """The keys, or the values, of KV head number head = b H_kv + g.

        Returns (arrays, where the head begins in each of them, numbers).
        """
        bits, gt, gc, asymmetric = scheme
        words = ceil_div(D * bits, 32)
        groups = head * ceil_div(int64(T_cap), gt) * ceil_div(D, gc)
        starts = head * T_cap * words, groups, head * R_cap * D
        return arrays, starts, (D, words, bits, gt, gc, asymmetric)

    @cuda.jit(device=True)
    def number(x, coded, t, i):
        """x_hat = s * level + z        channel i of token t

        In full precision after `coded` tokens.
        """
        (codes, scale, zero, exact), (row, groups, exact_row), numbers = x
        D, words, bits, gt, gc, asymmetric = numbers
        if t >= coded:
            return float32(exact[exact_row + int64(t - coded) * D + i])
        group = groups + int64(t // gt) * ceil_div(D, gc) + i // gc
        code = read_code(codes, row + int64(t) * words, i, bits)
        level = float32(code - code_offset(bits, asymmetric))
        z = float32(0)
        if asymmetric:
            z = float32(zero[group])
        return affine(scale[group], level, z)

    @cuda.jit(device=True)
    def score(q, row, keys, coded, t, scale, softcap):
        """S_t = scale q . k_t"""
        D, dot = keys[2][0], float32(0)
        for start in range(0, D, PART):
            part = float32(0)
            for i in range(start, min(start + PART, D)):
                part += float32(q[row * D + i]) * number(keys, coded, t, i)
            dot += part
        s = scale * dot
        return softcap * math.tanh(s / softcap) if softcap > float32(0) else s

    @cuda.jit(device=True)
    def weighted_sum(p, row, values, coded, tokens, i):
        """o_c = sum_t p_t v_tc"""
        o = float32(0)
        for start in range(0, tokens, PART):
            part = float32(0)
            for t in range(start, min(start + PART, tokens)):
                part += p[row + t] * number(values, coded, t, i)
            o += part
        return o

    @cuda.jit(device=True)
    def over_block(part, x, add):
        """The largest x of the block's threads, or their sum, for all: in pairs."""
        thread = cuda.threadIdx.x
        part[thread] = x
        cuda.syncthreads()
        n = cuda.blockDim.x // 2
        while n > 0:
            if thread < n:
                y = part[thread + n]
                part[thread] = part[thread] + y if add else max(part[thread], y)
            cuda.syncthreads()
            n //= 2
        x = part[0]
        cuda.syncthreads()  # `part` is written again by the next call
        return x

    def decode_v1(
        q, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, k_exact, v_exact,
        lengths, sink_logits, scores, out, B, H_q, H_kv, T_cap, R_cap, D, k_bits, k_gt,
        k_gc, k_asymmetric, v_bits, v_gt, v_gc, v_asymmetric, has_sink, scale, softcap,
    ):  # fmt: skip
        block_part = cuda.shared.array(1024, float32)
        b, h = cuda.blockIdx.x // H_q, cuda.blockIdx.x % H_q
        row, head = int64(b) * H_q + h, int64(b) * H_kv + h // (H_q // H_kv)
        k_arrays, k_scheme = (
            (k_codes, k_scale, k_zero, k_exact),
            (k_bits, k_gt, k_gc, k_asymmetric),
        )
        v_arrays, v_scheme = (
            (v_codes, v_scale, v_zero, v_exact),
            (v_bits, v_gt, v_gc, v_asymmetric),
        )
        keys = side(k_arrays, head, T_cap, R_cap, D, k_scheme)
        values = side(v_arrays, head, T_cap, R_cap, D, v_scheme)
        coded = lengths[2 * b]
        tokens = coded + lengths[2 * b + 1]
        first, threads = cuda.threadIdx.x, cuda.blockDim.x
        s = row * (T_cap + R_cap)

        sink = sink_logits[h] if has_sink else NOTHING
        m = sink
        for t in range(first, tokens, threads):
            scores[s + t] = score(q, row, keys, coded, t, scale, softcap)
            m = max(m, scores[s + t])
        m = over_block(block_part, m, False)

        l = float32(0)  # noqa: E741
        for t in range(first, tokens, threads):
            scores[s + t] = math.exp(scores[s + t] - m)
            l += scores[s + t]  # noqa: E741
        l = over_block(block_part, l, True)  # noqa: E741
        if has_sink:
            l += math.exp(sink - m)  # noqa: E741

        for i in range(first, D, threads):
            o = float32(0)
            if tokens > 0:
                o = weighted_sum(scores, s, values, coded, tokens, i) / l
            out[row * D + i] = o

    return {"decode_v1": decode_v1}


def signatures(c):
    """The Numba types of the arguments, by kernel."""
    from numba import float32, int32

    x, s = x_and_s(c)
    words, lengths, floats = map(array_of, (np.uint32, np.int32, np.float32))
    arrays = x, words, s, s, words, s, s, x, x, lengths, floats, floats, floats
    return {"decode_v1": (*arrays, *(int32,) * 15, float32, float32)}
