// pack v1: the equation, one thread per group for its scale, one thread per word for codes.
//
//     s = (max - min) / (2^b - 1),  z = min          or s = max|x| / (2^(b-1) - 1),  z = 0
//     code = clip(round((x - z) / s), lowest, highest) + offset
//
// The idea: a thread owns what it writes. Nothing is shared, so nothing can race; in
// return x is read twice, and neighbouring threads read it far apart.
//
// Needs X, the type of x (__half, __nv_bfloat16 or float), and S, the type of scales and
// zeros (__half or float). Any N, T, D, any group of gt tokens by gc channels, 1 to 8 bits.
// Arrays: x (N, T, D), scale and zero (N, ceil(T / gt), ceil(D / gc)), codes (N, T, W) in
// canonical words, W = ceil(D * bits / 32).
#include "kvq.cuh"

extern "C" __global__ void pack_v1_scales(const X* __restrict__ x, S* __restrict__ scale,
                                          S* __restrict__ zero, int N, int T, int D, int gt,
                                          int gc, int bits, int asymmetric) {
    i64 group = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 across = ceil_div(D, gc), along = ceil_div(T, gt);
    if (group >= N * along * across) return;

    i64 c0 = group % across * gc, t0 = group / across % along * gt;
    const X* head = x + group / (across * along) * T * D;
    float low = infinity(), high = -infinity();
    for (i64 t = t0; t < min(t0 + gt, (i64)T); ++t)
        for (i64 c = c0; c < min(c0 + gc, (i64)D); ++c) {
            float value = to_float(head[t * D + c]);
            low = fminf(low, value);
            high = fmaxf(high, value);
        }
    S s, z;
    scale_and_zero(low, high, bits, asymmetric, &s, &z);
    scale[group] = s;
    if (asymmetric) zero[group] = z;
}

extern "C" __global__ void pack_v1(const X* __restrict__ x, const S* __restrict__ scale,
                                   const S* __restrict__ zero, u32* __restrict__ codes, int N,
                                   int T, int D, int gt, int gc, int bits, int asymmetric) {
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 W = ceil_div((i64)D * bits, 32);
    if (index >= N * T * W) return;

    i64 row = index / W, n = row / T, t = row % T;
    i64 groups = (n * ceil_div(T, gt) + t / gt) * ceil_div(D, gc);  // those of this token
    int first_bit = index % W * 32;  // of the row, in this word
    u32 word = 0;
    for (int c = first_bit / bits; c < D && c * bits < first_bit + 32; ++c) {
        float s = to_float(scale[groups + c / gc]);
        float z = asymmetric ? to_float(zero[groups + c / gc]) : 0.0f;
        u32 code = to_code(to_float(x[row * D + c]), s, z, bits, asymmetric);
        // The first code may have begun in the word before, the last may end in the next.
        int shift = c * bits - first_bit;
        word |= shift < 0 ? code >> -shift : code << shift;
    }
    codes[index] = word;
}
