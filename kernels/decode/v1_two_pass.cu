// Decode attention, first version: the equation, literally.
//
//     attention = sum_t p_t v_t,   p_t = exp(S_t - m) / l,   S_t = scale q . k_t
//
//     m = max_t S_t     l = sum_t exp(S_t - m)
//
// with a soft cap S_t becomes softcap tanh(S_t / softcap). A sink logit takes part in m
// and l, and has no value. No token at all gives 0.
//
// The idea: every query head is one block, and every number is fetched when it is needed,
// from the packed codes: k_t and v_t exist one number at a time. First a thread per token
// for the scores, kept in global memory; then two passes over them for m and l; then a
// thread per channel for the sum.
//
// One block per query head: block b H_q + h, of a power of two of threads, at most 1024.
// Arrays: q (B, H_q, D); codes (B, H_kv, T_cap, words) in the canonical layout; scales and
// zeros (B, H_kv, groups of T_cap, groups of D); exact (B, H_kv, R_cap, D); lengths
// (B, 2), quantized and full-precision tokens; sink_logits (H_q); scores
// (B, H_q, T_cap + R_cap), scratch; out (B, H_q, D). What lies past a row's lengths is not
// read.
//
// Constants: X, S. Everything else is an argument.
#include "kvq.cuh"

constexpr int PART = 8;  // short sums, and their sum: rounding errors stay small

// The keys, or the values, of one KV head of one sequence.
struct Side {
    const u32* codes;
    const S *scale, *zero;
    const X* exact;
    int D, words, bits, gt, gc, asymmetric;
};

__device__ inline Side side(const u32* codes, const S* scale, const S* zero, const X* exact,
                            i64 head, int T_cap, int R_cap, int D, int bits, int gt, int gc,
                            int asymmetric) {
    int words = ceil_div(D * bits, 32);
    i64 groups = head * ceil_div(T_cap, gt) * ceil_div(D, gc);
    return {codes + head * T_cap * words, scale + groups, zero + (asymmetric ? groups : 0),
            exact + head * R_cap * D, D, words, bits, gt, gc, asymmetric};
}

//     x_hat = s * level + z         channel c of token t; full precision after `coded` tokens
__device__ inline float number(Side x, int coded, int t, int c) {
    if (t >= coded) return to_float(x.exact[(i64)(t - coded) * x.D + c]);
    i64 group = (i64)(t / x.gt) * ceil_div(x.D, x.gc) + c / x.gc;
    int code = read_code(x.codes + (i64)t * x.words, c, x.bits);
    int level = code - code_offset(x.bits, x.asymmetric);
    return affine(x.scale[group], level, x.asymmetric ? x.zero[group] : S(0.0f));
}

//     S_t = scale q . k_t
__device__ inline float score(const X* q, Side keys, int coded, int t, float scale,
                              float softcap) {
    float dot = 0;
    for (int start = 0; start < keys.D; start += PART) {
        float part = 0;
        for (int c = start; c < min(start + PART, keys.D); ++c)
            part = fmaf(to_float(q[c]), number(keys, coded, t, c), part);
        dot += part;
    }
    float s = scale * dot;
    return softcap > 0 ? softcap * tanhf(s / softcap) : s;
}

//     o_c = sum_t p_t v_tc
__device__ inline float weighted_sum(const float* p, Side values, int coded, int tokens,
                                     int c) {
    float o = 0;
    for (int start = 0; start < tokens; start += PART) {
        float part = 0;
        for (int t = start; t < min(start + PART, tokens); ++t)
            part = fmaf(p[t], number(values, coded, t, c), part);
        o += part;
    }
    return o;
}

// The largest x of the block's threads, or their sum, for all of them: in pairs.
__device__ inline float over_block(float x, bool sum) {
    __shared__ float part[1024];
    part[threadIdx.x] = x;
    __syncthreads();
    for (int n = blockDim.x / 2; n > 0; n /= 2) {
        if (threadIdx.x < n) {
            float y = part[threadIdx.x + n];
            part[threadIdx.x] = sum ? part[threadIdx.x] + y : fmaxf(part[threadIdx.x], y);
        }
        __syncthreads();
    }
    x = part[0];
    __syncthreads();  // `part` is written again by the next call
    return x;
}

extern "C" __global__ void decode_v1(
    const X* q, const u32* k_codes, const S* k_scale, const S* k_zero, const u32* v_codes,
    const S* v_scale, const S* v_zero, const X* k_exact, const X* v_exact,
    const int* lengths, const float* sink_logits, float* scores, float* out, int B, int H_q,
    int H_kv, int T_cap, int R_cap, int D, int k_bits, int k_gt, int k_gc, int k_asymmetric,
    int v_bits, int v_gt, int v_gc, int v_asymmetric, int has_sink, float scale,
    float softcap) {
    int b = blockIdx.x / H_q, h = blockIdx.x % H_q;
    i64 row = (i64)b * H_q + h, head = (i64)b * H_kv + h / (H_q / H_kv);
    Side keys = side(k_codes, k_scale, k_zero, k_exact, head, T_cap, R_cap, D, k_bits, k_gt,
                     k_gc, k_asymmetric);
    Side values = side(v_codes, v_scale, v_zero, v_exact, head, T_cap, R_cap, D, v_bits,
                       v_gt, v_gc, v_asymmetric);
    int coded = lengths[2 * b], tokens = coded + lengths[2 * b + 1];
    float* s = scores + row * (T_cap + R_cap);

    const float nothing = __uint_as_float(0xff800000);  // -inf
    float sink = has_sink ? sink_logits[h] : nothing;
    float m = sink;
    for (int t = threadIdx.x; t < tokens; t += blockDim.x) {
        s[t] = score(q + row * D, keys, coded, t, scale, softcap);
        m = fmaxf(m, s[t]);
    }
    m = over_block(m, false);

    float l = 0;
    for (int t = threadIdx.x; t < tokens; t += blockDim.x) l += s[t] = expf(s[t] - m);
    l = over_block(l, true);
    if (has_sink) l += expf(sink - m);

    for (int c = threadIdx.x; c < D; c += blockDim.x)
        out[row * D + c] = tokens ? weighted_sum(s, values, coded, tokens, c) / l : 0;
}
