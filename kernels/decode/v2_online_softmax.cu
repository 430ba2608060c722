// Decode attention, second version: the scores are never stored.
//
//     attention = sum_t exp(S_t - m) v_t / sum_t exp(S_t - m),   S_t = scale q . k_t
//
// The idea: online softmax. A warp takes a tile of tokens, and when a tile raises the
// maximum m, what was summed so far shrinks by exp(m - m'). So keys and values are read
// once, together, and nothing is kept of a token. `tile.cuh` has the equations, and the
// words: whole words are copied, and turned into numbers two at a time.
//
// One block per query head: block b H_q + h. It has 32 WARPS threads.
// Arrays: q (B, H_q, D); codes (B, H_kv, T_cap, words) in the paired layout; scales and
// zeros (B, H_kv, groups of T_cap, groups of D); exact (B, H_kv, R_cap, D); lengths
// (B, 2), quantized and full-precision tokens; sink_logits (H_q); out (B, H_q, D).
// What lies past a row's lengths is not read.
//
// Constants: HEAD_DIM, KEY_BITS, KEY_GROUP, KEY_PER_CHANNEL, KEY_ASYMMETRIC, VALUE_BITS,
// VALUE_GROUP, VALUE_ASYMMETRIC, WARPS, X, S.
#define HEADS 1
#include "tile.cuh"

// o / l of the block's head. A sink logit takes part in m and l, and has no value.
__device__ inline void write_output(const Shared& shared, float sink, float* out) {
    float m = largest_of_block(shared, 0), M = fmaxf(m, sink);
    float weight = weight_of(m, M);
    float l = sum_of_block(shared, 0, m) * weight + weight_of(sink, M);
    for (int c = threadIdx.x; c < HEAD_DIM; c += blockDim.x)
        out[c] = l > 0 ? shared.o[place_of(0, c)] * weight / l : 0;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    decode_v2(const X* q, const u32* k_codes, const S* k_scale, const S* k_zero,
              const u32* v_codes, const S* v_scale, const S* v_zero, const X* k_exact,
              const X* v_exact, const int* lengths, const float* sink_logits, float* out,
              int B, int H_q, int H_kv, int T_cap, int R_cap, int has_sink, float scale,
              float softcap) {
    __shared__ Shared shared;
    int b = blockIdx.x / H_q, h = blockIdx.x % H_q;
    i64 row = (i64)b * H_q + h, head = (i64)b * H_kv + h / (H_q / H_kv);
    Stored keys = stored<Keys>(k_codes, k_scale, k_zero, k_exact, head, T_cap, R_cap);
    Stored values = stored<Values>(v_codes, v_scale, v_zero, v_exact, head, T_cap, R_cap);
    Options options = {scale, softcap};

    read_queries(shared, q + row * HEAD_DIM, 1);
    State state = nothing_seen();
    attend_coded(shared, keys, values, 0, lengths[2 * b], options, state);
    attend_exact(shared, keys, values, 0, lengths[2 * b + 1], options, state);
    merge_warps(shared, state);
    write_output(shared, has_sink ? sink_logits[h] : NOTHING, out + row * HEAD_DIM);
}
