// dequant v1: the equation, one thread per value.
//
//     x_hat = s * (code - offset) + z
//
// The idea: find the code, find its scale, multiply, add. Neighbouring threads read the
// same word and write neighbouring numbers.
//
// Needs S, the type of scales and zeros (__half or float). Any N, T, D, any group of gt
// tokens by gc channels, 1 to 8 bits. Arrays: codes (N, T, W) in canonical words,
// W = ceil(D * bits / 32), scale and zero (N, ceil(T / gt), ceil(D / gc)), y (N, T, D).
#include "kvq.cuh"

extern "C" __global__ void dequant_v1(const u32* __restrict__ codes,
                                      const S* __restrict__ scale,
                                      const S* __restrict__ zero, float* __restrict__ y,
                                      int N, int T, int D, int gt, int gc, int bits,
                                      int asymmetric) {
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (i64)N * T * D) return;

    i64 row = index / D, n = row / T, t = row % T;
    int c = index % D;
    i64 group = (n * ceil_div(T, gt) + t / gt) * ceil_div(D, gc) + c / gc;
    u32 code = read_code(codes + row * ceil_div((i64)D * bits, 32), c, bits);
    float level = (int)code - code_offset(bits, asymmetric);
    S z = asymmetric ? zero[group] : S(0.0f);
    y[index] = affine(scale[group], level, z);
}
