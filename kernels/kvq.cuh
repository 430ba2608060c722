// What the kernels share: numbers and how they are stored, scales, codes in words.
//
//     x_hat = s * level + z,   level = code - offset,   offset = 2^(b-1), or 0 asymmetric
//
// A group is gt tokens by gc channels: token t and channel c of head n have the scale
// [n, t / gt, c / gc]. `device.py` says the same in Python.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef long long i64;  // offsets: a cache holds more than 2^31 numbers

constexpr u32 WARP = 0xffffffffu;  // all 32 lanes take part

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

// --- numbers ---------------------------------------------------------------------------
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ inline i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

// The largest and the smallest positive number of a stored format: kvq/dtypes.py.
template <class A>
struct Format;
template <>
struct Format<float> {
    static constexpr float largest = 0x1.fffffep127f, smallest = 0x1p-149f;
};
template <>
struct Format<__half> {
    static constexpr float largest = 65504, smallest = 0x1p-24f;
};

// x as the nearest number of a format, half to even. `to_stored` never makes it infinite.
__device__ inline void round_to(float x, float* out) { *out = x; }
__device__ inline void round_to(float x, __half* out) { *out = __float2half_rn(x); }
__device__ inline void round_to(float x, __nv_bfloat16* out) {
    *out = __float2bfloat16_rn(x);
}

template <class A>
__device__ inline A to_stored(float x) {
    constexpr float limit = Format<A>::largest;
    A out;
    round_to(sizeof(A) == 4 ? x : fminf(fmaxf(x, -limit), limit), &out);
    return out;
}

// --- 16 bytes at a time ----------------------------------------------------------------
// n neighbouring numbers of type A, moved by one instruction where they are 16 bytes.
template <class A, int n>
struct alignas(n * sizeof(A) < 16 ? n * sizeof(A) : 16) Vec {
    A v[n];
};

template <int bytes>
struct Raw;  // what is moved at once
template <>
struct Raw<2> {
    typedef unsigned short Type;
};
template <>
struct Raw<4> {
    typedef u32 Type;
};
template <>
struct Raw<8> {
    typedef unsigned long long Type;
};
template <>
struct Raw<16> {
    typedef uint4 Type;
};

template <int n, class A>
__device__ inline Vec<A, n> load(const A* p) {
    constexpr int bytes = n * sizeof(A), step = bytes < 16 ? bytes : 16;
    typedef typename Raw<step>::Type Piece;
    Vec<A, n> out;
    for (int i = 0; i < bytes / step; ++i)
        reinterpret_cast<Piece*>(&out)[i] = reinterpret_cast<const Piece*>(p)[i];
    return out;
}

template <int n, class A>
__device__ inline void store(A* p, const Vec<A, n>& value) {
    constexpr int bytes = n * sizeof(A), step = bytes < 16 ? bytes : 16;
    typedef typename Raw<step>::Type Piece;
    for (int i = 0; i < bytes / step; ++i)
        reinterpret_cast<Piece*>(p)[i] = reinterpret_cast<const Piece*>(&value)[i];
}

// The same in global memory: the compiler may take a copy of 16 bytes apart, but these two
// instructions it leaves whole. What is loaded must not change while the kernel runs.
template <int n, class A>
__device__ inline Vec<A, n> load_global(const A* p) {
    constexpr int bytes = n * sizeof(A), step = bytes < 16 ? bytes : 16;
    typedef typename Raw<step>::Type Piece;
    Vec<A, n> out;
    for (int i = 0; i < bytes / step; ++i)
        reinterpret_cast<Piece*>(&out)[i] = __ldg(reinterpret_cast<const Piece*>(p) + i);
    return out;
}

template <int n, class A>
__device__ inline void store_global(A* p, const Vec<A, n>& value) {
    constexpr int bytes = n * sizeof(A), step = bytes < 16 ? bytes : 16;
    typedef typename Raw<step>::Type Piece;
    for (int i = 0; i < bytes / step; ++i)
        __stwb(reinterpret_cast<Piece*>(p) + i, reinterpret_cast<const Piece*>(&value)[i]);
}

// --- scales ----------------------------------------------------------------------------
//     s = (max - min) / (2^b - 1),   z = min      asymmetric, both extremes within +-largest
//     s = max|x| / (2^(b-1) - 1),    z = 0        symmetric
//
// A scale too small for its format A becomes the smallest number of A.
template <class A>
__device__ inline void scale_and_zero(float low, float high, int bits, int asymmetric,
                                      A* scale, A* zero) {
    constexpr float limit = Format<A>::largest, smallest = Format<A>::smallest;
    float s, z = 0.0f;
    if (asymmetric) {
        z = fminf(fmaxf(low, -limit), limit);
        s = (fminf(fmaxf(high, -limit), limit) - z) / ((1 << bits) - 1);
    } else {
        s = fmaxf(fabsf(low), fabsf(high)) / ((1 << (bits - 1)) - 1);
    }
    if (s != 0 && s < smallest) s = smallest;
    *scale = to_stored<A>(s);
    *zero = to_stored<A>(z);
}

// --- codes -----------------------------------------------------------------------------
__device__ inline int code_offset(int bits, int asymmetric) {
    return asymmetric ? 0 : 1 << (bits - 1);
}

//     code = clip(round((x - z) / s), lowest, highest) + offset
//
// s, z as they are stored. A scale of 0 belongs to a group of one level: any s will do.
__device__ inline u32 to_code(float x, float s, float z, int bits, int asymmetric) {
    int half = 1 << (bits - 1);
    float lowest = asymmetric ? 0 : 1 - half;
    float highest = asymmetric ? 2 * half - 1 : half - 1;
    float y = rintf((x - z) / (s == 0 ? 1 : s));
    return (int)fminf(fmaxf(y, lowest), highest) + code_offset(bits, asymmetric);
}

//     x_hat = s * level + z, rounded twice, as by NumPy
//
// The product of a binary16 scale and a level is exact: then one fused operation is the same.
template <class A>
__device__ inline float affine(A s, float level, A z) {
    if (sizeof(A) == 2) return fmaf(to_float(s), level, to_float(z));
    return __fadd_rn(__fmul_rn(to_float(s), level), to_float(z));
}

// Canonical words: code i is the bits b*i .. b*i + b-1 of its row, lowest bit first.
__device__ inline u32 read_code(const u32* row, int i, int bits) {
    int word = i * bits >> 5, shift = i * bits & 31;
    u32 code = row[word] >> shift;
    if (shift + bits > 32) code |= row[word + 1] << (32 - shift);  // it straddles two words
    return code & ((1u << bits) - 1);
}

// Paired words: element e = 2p + h of a word stands at bit 16*h + bits*p. So one shift
// and one mask give two neighbours, one in each half of a register. For 3 bits see
// `layouts.py`: a word of 2 low bits for each 16 codes, one of high bits for 32 codes.
template <int bits>
__device__ inline u32 pair_of_codes(u32 word, int p) {
    return (word >> (bits * p)) & (0x00010001u * ((1u << bits) - 1));
}

// Two levels from two codes 16 bits apart, without an integer-to-float conversion: in
// binary16, the bits 0x6400 | code are the number 1024 + code. The difference is exact.
__device__ inline float2 pair_of_levels(u32 codes, int offset) {
    u32 magic = codes | 0x64006400u;
    __half2 level = __hsub2(reinterpret_cast<__half2&>(magic),
                            __float2half2_rn(1024.0f + offset));
    return __half22float2(level);
}
