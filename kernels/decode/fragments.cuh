// Tensor-core attention over pages: what v4 and v5 share.
//
// One instruction of a warp, mma.m16n8k16, is C (16 x 8) += A (16 x 16) B (16 x 8): A and B
// in binary16 (or both in bfloat16), C in float32. Each lane holds a part of each matrix,
// its fragment. With g = lane / 4, t = lane % 4:
//
//     A   rows g, g + 8    columns 2t, 2t + 1, 2t + 8, 2t + 9      four registers
//     B   rows 2t, 2t + 1, 2t + 8, 2t + 9             column g     two registers
//     C   rows g, g + 8    columns 2t, 2t + 1                      four registers
//
// The cache is A, whatever is small is B:
//
//     S^T = K q^T      16 tokens x 8 heads, a sum over channels
//     O^T = V^T P^T    16 channels x 8 heads, a sum over tokens
//
// So the 8 columns are query heads, and none of the 16 rows is wasted on them. A page
// (`pages.py`) stores codes in the order of A: 16 bytes of a lane are whole fragments.
//
// Constants: those of `page.cuh`; RATIO = H_q / H_kv; WARPS of a block; SOFTCAP, 0 or 1; X,
// the type of q.
#pragma once
#include "page.cuh"

// Query heads in tiles of 8. Two tiles use the same A; at 256 channels they do not fit.
constexpr int TILES = RATIO > 8 && HEAD_DIM <= 128 ? 2 : 1;
constexpr int HEADS = 8 * TILES;  // of a block
constexpr int CHUNKS = divide_up(RATIO, HEADS);
// Warps of a multiprocessor, which has 65536 registers: 16 with 128 registers a thread, 12
// with 168 where there are more sums or addresses to keep, 8 with 255 where O alone takes
// 64. Memory that delivers 4.3 TB/s to 132 multiprocessors after 0.75 us wants 24 KB on
// their way to each: that is 2 KB for each of 12 warps, 4 loads of 16 bytes by each lane.
constexpr bool FEW =
    !Keys::coded || (Keys::per_channel && Keys::group == STEP && !Values::lifted);
constexpr int RESIDENT = TILES * HEAD_DIM > 128 ? 8 : FEW ? 16 : 12;

#define NOTHING __uint_as_float(0xff800000)  // -inf, the maximum of no scores

// Numbers in bfloat16 reach beyond binary16. So products with them are bfloat16's, and q
// and p are rounded to it as well: 8 significant bits, as such a model computes itself.
template <class A>
constexpr bool is_bfloat = false;
template <>
constexpr bool is_bfloat<__nv_bfloat16> = true;
template <class Side>
constexpr bool BFLOAT = !Side::coded && is_bfloat<E>;

// --- instructions ----------------------------------------------------------------------
#define MMA(type)                                                                        \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, " \
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                  \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

template <bool bfloat = false>
__device__ inline void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if constexpr (bfloat) MMA("bf16");
    else MMA("f16");
}

// The transpose of an 8 x 8 matrix whose row g lies in the lanes 4g .. 4g + 3.
__device__ inline u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two binary16 numbers in a register: x y, x y + z.
__device__ inline u32 multiply(u32 x, u32 y) {
    u32 out;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
    return out;
}

__device__ inline u32 multiply_add(u32 x, u32 y, u32 z) {
    u32 out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(y), "r"(z));
    return out;
}

// x & mask | magic, in one instruction.
__device__ inline u32 select(u32 x, u32 mask, u32 magic) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(x), "r"(mask), "r"(magic));
    return out;
}

template <bool bfloat = false>
__device__ inline u32 pair(float low, float high) {
    if constexpr (bfloat) {
        __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<u32&>(x);
    } else {
        __half2 x = __floats2half2_rn(low, high);
        return reinterpret_cast<u32&>(x);
    }
}
__device__ inline u32 both(float x) { return pair(x, x); }
__device__ inline __half2 halves(u32 x) { return reinterpret_cast<__half2&>(x); }

__device__ inline u32 word(const uint4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// --- codes to numbers ------------------------------------------------------------------
//     level = (magic | code << position) * factor + constant,   exactly
//
// Or-ing a code into the mantissa of a power of two makes a binary16 number without a
// conversion: 1024 + code from the bits 0x6400, 1 + code / 4 from 0x3c00. One fused
// multiply-add for two numbers leaves the level.
__device__ inline u32 level(u32 magic, float factor, float constant) {
    return multiply_add(magic, both(factor), both(constant));
}

// Fragment j of those that 16 bytes hold: levels, or for 2 bits 1 + code / 4^k.
template <class Side>
__device__ inline void fragment(const uint4& unit, int j, u32 (&a)[4]) {
    constexpr int bits = Side::bits, offset = Side::offset;
    if constexpr (bits == 16) {
        for (int r = 0; r < 4; ++r) a[r] = word(unit, r);
    } else if constexpr (bits == 8) {
        for (int r = 0; r < 4; ++r) {  // two bytes, each below a byte 0x64
            u32 w = __byte_perm(word(unit, 2 * j + r / 2), 0x64646464,
                                r % 2 ? 0x4342 : 0x4140);
            a[r] = level(w, 1, -1024 - offset);
        }
    } else if constexpr (bits == 4) {
        u32 low = word(unit, j), high = low >> 8;  // a0 a1 | a2 a3 of both halves
        for (int r = 0; r < 4; ++r) {
            u32 w = select(r < 2 ? low : high, r % 2 ? 0x00f000f0 : 0x000f000f, 0x64006400);
            a[r] = r % 2 ? level(w, 1 / 16.0f, -64 - offset) : level(w, 1, -1024 - offset);
        }
    } else {
        u32 w = word(unit, j / 2), swapped = __byte_perm(w, 0, 0x2301);
        for (int r = 0; r < 4; ++r) {
            int k = place<Side>(j, r), other = Side::values ? r / 2 : r % 2;
            a[r] = select(other ? swapped : w, 0x0c000c00 >> (2 * k), 0x3c003c00);
        }
    }
}
