// A page: what is where. `pages.py` says the same in Python, and why.
//
//     [ key scales | key zeros | key codes | value codes | value scales | value zeros ]
//
// Constants: HEAD_DIM (64, 128 or 256); KEY_BITS (8, 4 or 2), KEY_GROUP, KEY_PER_CHANNEL,
// KEY_ASYMMETRIC; VALUE_BITS, VALUE_GROUP, VALUE_ASYMMETRIC. Scales are binary16. E, the
// type of numbers in full precision: __half or __nv_bfloat16. Where there are no others,
// KEY_BITS = VALUE_BITS = 16.
#pragma once
#include "kvq.cuh"

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

constexpr int BLOCKS = HEAD_DIM / 16;  // of 16 channels
constexpr int STEP = 64;               // tokens that a warp takes at a time, of codes
constexpr int EXACT_STEP = 16;         // the same, of numbers: they are larger
constexpr int PAGE = KEY_PER_CHANNEL && KEY_GROUP > STEP ? KEY_GROUP : STEP;  // tokens

// Keys or values. A is a matrix of 16 x 16 of them: `fragments.cuh`.
template <int bits_, int group_, bool per_channel_, bool asymmetric_, bool values_>
struct Side {
    static constexpr int bits = bits_, group = group_;
    static constexpr bool coded = bits < 16, per_channel = per_channel_,
                          asymmetric = asymmetric_, values = values_;
    // For 2 bits, a multiply-add for each pair is too much: a byte holds 4 codes. So they
    // enter the products as 1 + code / 4^k; 4^k goes into q or out of o, the 1 into a sum.
    static constexpr bool lifted = bits == 2;
    static constexpr int offset = !coded || asymmetric ? 0 : 1 << (bits - 1);
    static constexpr int columns = coded && !per_channel ? HEAD_DIM / group : 1;
    static constexpr int fragments = 16 / bits;  // in 16 bytes of a lane
    static constexpr int tokens = coded ? STEP : EXACT_STEP;  // of a step
    // Sizes in units of 16 bytes: codes and scales of a step, but the scales of keys per
    // channel are those of a page.
    static constexpr int step = 32 * (tokens / 16) * BLOCKS / fragments;
    static constexpr int numbers =
        !coded ? 0 : per_channel ? PAGE / group * HEAD_DIM / 8 : STEP * columns / 8;
    static constexpr int zeros = asymmetric ? numbers : 0;
};

typedef Side<KEY_BITS, KEY_GROUP, KEY_PER_CHANNEL, KEY_ASYMMETRIC, false> Keys;
typedef Side<VALUE_BITS, VALUE_GROUP, false, VALUE_ASYMMETRIC, true> Values;
typedef Side<16, HEAD_DIM, false, false, false> Exact;  // numbers as they are

// A page: scale and zero of the keys; then for each step the codes of the keys and of the
// values, and scale and zero of the values.
template <class K, class V>
struct Record {
    static constexpr int tokens = K::coded ? PAGE : STEP, in_page = tokens / K::tokens;
    static constexpr int key_zero = K::numbers, steps = key_zero + K::zeros;
    static constexpr int values = K::step, value_scale = values + V::step;
    static constexpr int value_zero = value_scale + V::numbers;
    static constexpr int step = value_zero + V::zeros;
    static constexpr int size = steps + in_page * step;
};

// 2 bits: register r of a fragment stands at one of 4 places of a 16-bit half, of the word
// or of the word with its bytes swapped. Or-ed into 1, place k makes 1 + code / 4^k.
template <class Side>
__device__ inline int place(int d, int r) {
    return 1 + d % 2 * 2 + (Side::values ? r % 2 : r / 2);
}
constexpr float fourth_power(int k) { return 1 << (2 * k); }  // 4^k
