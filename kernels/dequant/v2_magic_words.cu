// dequant v2: one thread per word, magic-number conversion, 16-byte stores.
//
//     x_hat = s * (code - offset) + z
//
// The idea: two codes become two numbers by an OR and a subtraction (`pair_of_levels`),
// and memory is touched in whole lines: a warp reads neighbouring words, one per lane, and
// writes 16 bytes per lane. A word holds more numbers than 16 bytes do, so in each step a
// lane takes the word whose numbers it is going to store from the lane that has it.
//
// Needs BITS (2, 3, 4 or 8), HEAD_DIM, GROUP, PER_CHANNEL (0 or 1), ASYMMETRIC (0 or 1),
// S, the type of scales and zeros, and Y, the type of y (each __half or float). HEAD_DIM
// is a multiple of 16; per token, so is GROUP. `v2_magic_words.py` knows how many threads
// that takes; the block is a multiple of 32. (8 bits to __half: a word is 8 bytes of y.)
// Arrays: codes (N, T, W) in paired words (`layouts.py`), scale and zero
// (N, T, ceil(D / GROUP)), or per channel (N, ceil(T / GROUP), D), y (N, T, D).
#include "kvq.cuh"

constexpr int D = HEAD_DIM;
constexpr int UNIT = BITS == 3 ? 32 : 32 / BITS;  // codes that fill whole words
constexpr int UNIT_WORDS = BITS == 3 ? 3 : 1;
constexpr int PADDED = (D + UNIT - 1) / UNIT * UNIT;  // codes of a row, with padding
constexpr int W = PADDED / UNIT * UNIT_WORDS;
constexpr int UNITS = BITS == 3 ? 8 : 32;  // of a warp: 24 words, three whole sectors
constexpr int FITS = 16 / sizeof(Y);
constexpr int VEC = FITS < UNIT ? FITS : UNIT;  // numbers that a lane stores at once
constexpr int STEPS = UNITS * UNIT / (32 * VEC);

// VEC / 2 pairs of codes, from code i of the warp on; `word` is the lane's own.
__device__ void fetch(u32 word, int i, u32* pairs) {
    int unit = i / UNIT, p = i % UNIT / 2;
    if constexpr (BITS == 3) {
        u32 low = __shfl_sync(WARP, word, 3 * unit + i % 32 / 16);
        u32 high = __shfl_sync(WARP, word, 3 * unit + 2);
        for (int k = 0; k < VEC / 2; ++k)
            pairs[k] = pair_of_codes<2>(low, p % 8 + k) | pair_of_codes<1>(high, p + k) << 2;
    } else {
        u32 other = __shfl_sync(WARP, word, unit);
        for (int k = 0; k < VEC / 2; ++k) pairs[k] = pair_of_codes<BITS>(other, p + k);
    }
}

extern "C" __global__ void dequant_v2(const u32* __restrict__ codes,
                                      const S* __restrict__ scale,
                                      const S* __restrict__ zero, Y* __restrict__ y, int N,
                                      int T) {
    constexpr int own = PER_CHANNEL ? VEC : 1;  // scales of VEC neighbouring numbers
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 warp = thread / 32, rows = (i64)N * T;
    int lane = thread % 32;
    i64 index = warp * UNITS * UNIT_WORDS + lane;
    bool mine = lane < UNITS * UNIT_WORDS && index < rows * W;
    u32 word = mine ? codes[index] : 0;

    // What a warp spans is small: 64-bit divisions are made once, for its first number.
    i64 start = warp * UNITS * UNIT, start_row = start / PADDED, start_n = start_row / T;
    int start_c = start % PADDED, start_t = start_row % T;
    i64 groups = PER_CHANNEL ? ceil_div(T, GROUP) : ceil_div(D, GROUP);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        int i = (step * 32 + lane) * VEC;
        u32 pairs[VEC / 2];
        fetch(word, i, pairs);

        int c = (start_c + i) % PADDED, down = (start_c + i) / PADDED;
        i64 row = start_row + down;
        if (row >= rows || c >= D) continue;
        i64 at = row * groups + c / GROUP;  // where the scale is
        if (PER_CHANNEL) {
            int t = start_t + down;
            at = ((start_n + t / T) * groups + t % T / GROUP) * D + c;
        }
        Vec<S, own> s = load_global<own>(scale + at), z = {};
        if (ASYMMETRIC) z = load_global<own>(zero + at);
        Vec<Y, VEC> out;
        for (int k = 0; k < VEC; k += 2) {
            float2 level = pair_of_levels(pairs[k / 2], code_offset(BITS, ASYMMETRIC));
            out.v[k] = to_stored<Y>(affine(s.v[k % own], level.x, z.v[k % own]));
            out.v[k + 1] = to_stored<Y>(affine(s.v[(k + 1) % own], level.y,
                                               z.v[(k + 1) % own]));
        }
        store_global(y + row * D + c, out);
    }
}
