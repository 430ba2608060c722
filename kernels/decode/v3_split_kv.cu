// Decode attention, third version: keys and values are read once for all query heads that
// share them, by many blocks.
//
//     M = max_i m_i     l = sum_i l_i exp(m_i - M)     o = sum_i o_i exp(m_i - M)
//
//     attention = o / l,   (m_i, l_i, o_i) the state of split i of the tokens
//
// The idea: split-KV. A sequence is cut into splits of tokens_per_split tokens, quantized
// ones first. One block works on one split of one KV head, for every query head of its
// group: a word is fetched and turned into numbers once for all of them (`tile.cuh`). It
// writes an unfinished state; a second kernel merges the splits in their order, so that
// the result is always the same.
//
// decode_v3: block ((split B + b) H_kv + g) CHUNKS + chunk, of 32 WARPS threads. A block
// serves at most 8 heads; CHUNKS blocks share a larger group. tokens_per_split is a
// multiple of 32 and, for keys per channel, of KEY_GROUP; splits tokens_per_split is at
// least the tokens of the longest sequence.
// decode_v3_merge: block b H_q + h, of any number of threads.
// Arrays: as for v2; part_o (splits, B, H_q, D), part_ml (splits, B, H_q, 2).
//
// Constants: those of v2, and RATIO = H_q / H_kv.
constexpr int CHUNKS = (RATIO + 7) / 8;
constexpr int HEADS = (RATIO + CHUNKS - 1) / CHUNKS;  // query heads of a block
#include "tile.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    decode_v3(const X* q, const u32* k_codes, const S* k_scale, const S* k_zero,
              const u32* v_codes, const S* v_scale, const S* v_zero, const X* k_exact,
              const X* v_exact, const int* lengths, float* part_o, float* part_ml, int B,
              int H_q, int H_kv, int T_cap, int R_cap, float scale, float softcap,
              int splits, int tokens_per_split) {
    __shared__ Shared shared;
    int chunk = blockIdx.x % CHUNKS, g = blockIdx.x / CHUNKS % H_kv;
    int b = blockIdx.x / CHUNKS / H_kv % B, split = blockIdx.x / CHUNKS / H_kv / B;
    int h = g * RATIO + chunk * HEADS, heads = min(HEADS, RATIO - chunk * HEADS);
    i64 head = (i64)b * H_kv + g;
    Stored keys = stored<Keys>(k_codes, k_scale, k_zero, k_exact, head, T_cap, R_cap);
    Stored values = stored<Values>(v_codes, v_scale, v_zero, v_exact, head, T_cap, R_cap);
    Options options = {scale, softcap};

    read_queries(shared, q + ((i64)b * H_q + h) * HEAD_DIM, heads);
    State state = nothing_seen();
    int begin = split * tokens_per_split, end = begin + tokens_per_split;
    int coded = lengths[2 * b], exact = lengths[2 * b + 1];
    attend_coded(shared, keys, values, min(begin, coded), min(end, coded), options, state);
    attend_exact(shared, keys, values, max(begin - coded, 0), min(end - coded, exact),
                 options, state);
    merge_warps(shared, state);

    i64 row = ((i64)split * B + b) * H_q + h;
    for (int i = threadIdx.x; i < heads * HEAD_DIM; i += blockDim.x)
        part_o[row * HEAD_DIM + i] = shared.o[place_of(i / HEAD_DIM, i % HEAD_DIM)];
    if (threadIdx.x < heads) {
        float m = largest_of_block(shared, threadIdx.x);
        part_ml[2 * (row + threadIdx.x)] = m;
        part_ml[2 * (row + threadIdx.x) + 1] = sum_of_block(shared, threadIdx.x, m);
    }
}

// A sink logit takes part in M and l, and has no value. No token at all gives 0.
extern "C" __global__ void decode_v3_merge(const float* part_o, const float* part_ml,
                                           const float* sink_logits, float* out, int B,
                                           int H_q, int splits, int has_sink) {
    i64 row = blockIdx.x, rows = (i64)B * H_q;
    float sink = has_sink ? sink_logits[row % H_q] : NOTHING, M = sink;
    for (int i = 0; i < splits; ++i) M = fmaxf(M, part_ml[2 * (i * rows + row)]);
    float l = weight_of(sink, M);
    for (int i = 0; i < splits; ++i) {
        const float* ml = part_ml + 2 * (i * rows + row);
        l += ml[1] * weight_of(ml[0], M);
    }
    for (int c = threadIdx.x; c < HEAD_DIM; c += blockDim.x) {
        float o = 0;
        for (int i = 0; i < splits; ++i)
            o += part_o[(i * rows + row) * HEAD_DIM + c]
                 * weight_of(part_ml[2 * (i * rows + row)], M);
        out[row * HEAD_DIM + c] = l > 0 ? o / l : 0;
    }
}
