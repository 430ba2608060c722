"""decode v2 in Numba: online softmax, so that the scores are never stored.

    attention = sum_t exp(S_t - m) v_t / sum_t exp(S_t - m),   S_t = scale q . k_t

The twin of `v2_online_softmax.cu`: same arrays, same constants, same blocks.
"""

import numpy as np

from kvq.kernels.decode.tile import UNIT, array_types, block_functions, plan
from kvq.kernels.device import array_of


def kernels(c):
    """The kernel as a plain function, by name."""
    from numba import cuda, float32, int64, uint32

    f, p = block_functions(c), plan(c)
    D, WARPS = c.HEAD_DIM, c.WARPS
    SPACE, SCALES = p.space, p.scales
    ALL_WORDS, ALL_SCALES = WARPS * SPACE, WARPS * SCALES
    stored_keys, stored_values = f.stored_keys, f.stored_values
    nothing_seen, read_queries = f.nothing_seen, f.read_queries
    attend_coded, attend_exact = f.attend_coded, f.attend_exact
    merge_warps, weight_of, place_of = f.merge_warps, f.weight_of, f.place_of
    largest_of_block, sum_of_block = f.largest_of_block, f.sum_of_block
    NOTHING = float32(-np.inf)

    @cuda.jit(device=True)
    def write_output(shared, sink, out, row):
        """o / l. A sink logit takes part in m and l, and has no value."""
        shared_m, shared_l, shared_o = shared
        m = largest_of_block(shared_m, 0)
        M = max(m, sink)
        weight = weight_of(m, M)
        l = sum_of_block(shared_m, shared_l, 0, m) * weight  # noqa: E741
        l += weight_of(sink, M)  # noqa: E741
        for i in range(cuda.threadIdx.x, D, cuda.blockDim.x):
            o = float32(0)
            if l > float32(0):
                o = shared_o[place_of(0, i)] * weight / l
            out[row * D + i] = o

    def decode_v2(
        q, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, k_exact, v_exact,
        lengths, sink_logits, out, B, H_q, H_kv, T_cap, R_cap, has_sink, scale, softcap,
    ):  # fmt: skip
        shared_q = cuda.shared.array(D, float32)
        shared_words = cuda.shared.array(ALL_WORDS, uint32)
        shared_scale = cuda.shared.array(ALL_SCALES, float32)
        shared_zero = cuda.shared.array(ALL_SCALES, float32)
        shared_o = cuda.shared.array(D, float32)
        shared_m = cuda.shared.array(WARPS, float32)
        shared_l = cuda.shared.array(WARPS, float32)
        m = cuda.local.array(1, float32)
        l = cuda.local.array(1, float32)  # noqa: E741
        o = cuda.local.array(UNIT, float32)

        warp = cuda.threadIdx.x // 32
        tile = (
            shared_words[warp * SPACE : warp * SPACE + SPACE],
            shared_scale[warp * SCALES : warp * SCALES + SCALES],
            shared_zero[warp * SCALES : warp * SCALES + SCALES],
        )
        shared, state, options = (
            (shared_m, shared_l, shared_o),
            (m, l, o),
            (scale, softcap),
        )
        b, h = cuda.blockIdx.x // H_q, cuda.blockIdx.x % H_q
        row, head = int64(b) * H_q + h, int64(b) * H_kv + h // (H_q // H_kv)
        keys = stored_keys(k_codes, k_scale, k_zero, k_exact, head, T_cap, R_cap)
        values = stored_values(v_codes, v_scale, v_zero, v_exact, head, T_cap, R_cap)

        read_queries(shared_q, q, row, 1)
        nothing_seen(state)
        attend_coded(shared_q, tile, keys, values, 0, lengths[2 * b], options, state)
        attend_exact(
            shared_q, tile, keys, values, 0, lengths[2 * b + 1], options, state
        )
        merge_warps(shared, state)
        write_output(shared, sink_logits[h] if has_sink else NOTHING, out, row)

    return {"decode_v2": decode_v2}


def signatures(c):
    """The Numba types of the arguments, by kernel."""
    from numba import float32, int32

    floats = array_of(np.float32)
    numbers = (*(int32,) * 6, float32, float32)
    return {"decode_v2": (*array_types(c), floats, floats, *numbers)}
