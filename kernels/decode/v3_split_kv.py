"""decode v3 in Numba: split-KV, keys and values read once for a group of heads.

    M = max_i m_i     l = sum_i l_i exp(m_i - M)     o = sum_i o_i exp(m_i - M)

    attention = o / l,   (m_i, l_i, o_i) the state of split i of the tokens

The twin of `v3_split_kv.cu`: same arrays, same constants, same blocks.
"""

import numpy as np

from kvq.kernels.decode.tile import (
    UNIT,
    array_types,
    block_functions,
    chunks_and_heads,
    plan,
)
from kvq.kernels.device import array_of


def kernels(c):
    """The two kernels as plain functions, by name."""
    from numba import cuda, float32, int64, uint32

    f, p = block_functions(c), plan(c)
    D, WARPS, RATIO = c.HEAD_DIM, c.WARPS, c.RATIO
    CHUNKS, HEADS = chunks_and_heads(RATIO)
    SPACE, SCALES = p.space, p.scales
    NUMBERS, STATE, PARTS = HEADS * D, HEADS * UNIT, HEADS * WARPS
    ALL_WORDS, ALL_SCALES = WARPS * SPACE, WARPS * SCALES
    stored_keys, stored_values = f.stored_keys, f.stored_values
    nothing_seen, read_queries = f.nothing_seen, f.read_queries
    attend_coded, attend_exact = f.attend_coded, f.attend_exact
    merge_warps, weight_of, place_of = f.merge_warps, f.weight_of, f.place_of
    largest_of_block, sum_of_block = f.largest_of_block, f.sum_of_block
    NOTHING = float32(-np.inf)

    @cuda.jit(device=True)
    def write_state(shared, part_o, part_ml, row, heads):
        shared_m, shared_l, shared_o = shared
        for i in range(cuda.threadIdx.x, heads * D, cuda.blockDim.x):
            part_o[row * D + i] = shared_o[place_of(i // D, i % D)]
        h = cuda.threadIdx.x
        if h < heads:
            m = largest_of_block(shared_m, h)
            part_ml[2 * (row + h)] = m
            part_ml[2 * (row + h) + 1] = sum_of_block(shared_m, shared_l, h, m)

    def decode_v3(
        q, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, k_exact, v_exact,
        lengths, part_o, part_ml, B, H_q, H_kv, T_cap, R_cap, scale, softcap, splits,
        tokens_per_split,
    ):  # fmt: skip
        shared_q = cuda.shared.array(NUMBERS, float32)
        shared_words = cuda.shared.array(ALL_WORDS, uint32)
        shared_scale = cuda.shared.array(ALL_SCALES, float32)
        shared_zero = cuda.shared.array(ALL_SCALES, float32)
        shared_o = cuda.shared.array(NUMBERS, float32)
        shared_m = cuda.shared.array(PARTS, float32)
        shared_l = cuda.shared.array(PARTS, float32)
        m = cuda.local.array(HEADS, float32)
        l = cuda.local.array(HEADS, float32)  # noqa: E741
        o = cuda.local.array(STATE, float32)

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
        block = cuda.blockIdx.x
        chunk, g = block % CHUNKS, block // CHUNKS % H_kv
        b, split = block // CHUNKS // H_kv % B, block // CHUNKS // H_kv // B
        h, heads = g * RATIO + chunk * HEADS, min(HEADS, RATIO - chunk * HEADS)
        head = int64(b) * H_kv + g
        keys = stored_keys(k_codes, k_scale, k_zero, k_exact, head, T_cap, R_cap)
        values = stored_values(v_codes, v_scale, v_zero, v_exact, head, T_cap, R_cap)

        read_queries(shared_q, q, int64(b) * H_q + h, heads)
        nothing_seen(state)
        begin = split * tokens_per_split
        end = begin + tokens_per_split
        coded, exact = lengths[2 * b], lengths[2 * b + 1]
        first, last = min(begin, coded), min(end, coded)
        attend_coded(shared_q, tile, keys, values, first, last, options, state)
        first, last = max(begin - coded, 0), min(end - coded, exact)
        attend_exact(shared_q, tile, keys, values, first, last, options, state)
        merge_warps(shared, state)
        write_state(shared, part_o, part_ml, (int64(split) * B + b) * H_q + h, heads)

    def decode_v3_merge(part_o, part_ml, sink_logits, out, B, H_q, splits, has_sink):
        row, rows = int64(cuda.blockIdx.x), int64(B) * H_q
        sink = sink_logits[row % H_q] if has_sink else NOTHING
        M = sink
        for i in range(splits):
            M = max(M, part_ml[2 * (i * rows + row)])
        l = weight_of(sink, M)  # noqa: E741
        for i in range(splits):
            at = 2 * (i * rows + row)
            l += part_ml[at + 1] * weight_of(part_ml[at], M)  # noqa: E741
        for j in range(cuda.threadIdx.x, D, cuda.blockDim.x):
            o = float32(0)
            for i in range(splits):
                weight = weight_of(part_ml[2 * (i * rows + row)], M)
                o += part_o[(i * rows + row) * D + j] * weight
            out[row * D + j] = o / l if l > float32(0) else float32(0)

    return {"decode_v3": decode_v3, "decode_v3_merge": decode_v3_merge}


def signatures(c):
    """The Numba types of the arguments, by kernel."""
    from numba import float32, int32

    floats = array_of(np.float32)
    numbers = (*(int32,) * 5, float32, float32, int32, int32)
    return {
        "decode_v3": (*array_types(c), floats, floats, *numbers),
        "decode_v3_merge": (*(floats,) * 4, *(int32,) * 4),
    }
