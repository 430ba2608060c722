// pack v2: scale, zero and codes in one pass; x is read once, 16 bytes per thread.
//
//     s = (max - min) / (2^b - 1),  z = min          or s = max|x| / (2^(b-1) - 1),  z = 0
//     code = clip(round((x - z) / s), lowest, highest) + offset
//
// The idea: what a thread has read stays in its registers. Only extremes travel between
// threads, then the numbers become codes where they are.
//     per token     a group is a few neighbouring lanes: extremes by warp shuffles
//     per channel   a group runs along tokens, so a block takes GROUP tokens of one head,
//                   one contiguous piece of memory: extremes through shared memory
// A word is then joined from the codes of the lanes that have them, by shuffles.
//
// Needs BITS (2, 3, 4 or 8), HEAD_DIM, GROUP, PER_CHANNEL (0 or 1), ASYMMETRIC (0 or 1),
// X, the type of x (__half, __nv_bfloat16 or float), and S, of scales and zeros (__half or
// float). HEAD_DIM is a multiple of 16. GROUP is 16, 32, 64 or 128; per token also
// HEAD_DIM, and the last group of a token may be smaller. `v2_one_pass.py` knows which
// combinations are built and how many threads they take; the block must be as it says.
// Arrays: x (N, T, D), scale and zero (N, T, ceil(D / GROUP)), or per channel
// (N, ceil(T / GROUP), D), codes (N, T, W) in paired words (`layouts.py`).
// Every access fills whole sectors, but for 3 bits and D = 80: there a row of codes is 36
// bytes, and per token, in groups of 16, 1.07 times the ideal number is touched.
#include "kvq.cuh"

constexpr int D = HEAD_DIM;
constexpr int VEC = 16 / sizeof(X);  // numbers that a thread reads at once
constexpr int UNIT = BITS == 3 ? 32 : 32 / BITS;  // codes that fill whole words
constexpr int UNIT_WORDS = BITS == 3 ? 3 : 1;
constexpr int PADDED = (D + UNIT - 1) / UNIT * UNIT;  // codes of a row, with padding
constexpr int W = PADDED / UNIT * UNIT_WORDS;

__host__ __device__ constexpr int power_of_two(int n) {
    int p = 1;
    while (p < n) p *= 2;
    return p;
}

// A word of n = 32 / bits codes. This thread has `mine` of them, from element `first` on;
// its neighbours have the others.
template <int bits, int mine>
__device__ u32 join(const u32* code, int first) {
    u32 word = 0;
#pragma unroll
    for (int e = 0; e < mine; e += 2)  // two neighbours are 16 bits apart
        word |= (code[e] | code[e + 1] << 16) << ((first + e) / 2 * bits);
#pragma unroll
    for (int lanes = 1; lanes * mine < 32 / bits; lanes *= 2)
        word |= __shfl_xor_sync(WARP, word, lanes);
    return word;
}

// The codes of channel, ..., channel + VEC - 1, into their row; all lanes take part.
__device__ void store_codes(u32* row, int channel, const u32* code, bool active) {
    if constexpr (BITS == 3) {
        u32 low[VEC], high[VEC];
        for (int j = 0; j < VEC; ++j) low[j] = code[j] & 3, high[j] = code[j] >> 2;
        u32 lows = join<2, VEC>(low, channel % 16), highs = join<1, VEC>(high, channel % 32);
        // Of the lanes that share 32 codes the first three store a word each. The second
        // low word belongs to the lane 16 / VEC: lane 1 fetches it.
        u32 second = __shfl_down_sync(WARP, lows, 16 / VEC - 1);
        int lane = channel % 32 / VEC;
        u32 word = lane == 0 ? lows : lane == 1 ? second : highs;
        if (active && lane < 3) row[channel / 32 * 3 + lane] = word;
    } else {
        constexpr int mine = UNIT < VEC ? UNIT : VEC;
        Vec<u32, VEC / mine> words;
        for (int k = 0; k < VEC / mine; ++k)
            words.v[k] = join<BITS, mine>(code + k * mine, channel % UNIT);
        if (active && channel % UNIT == 0) store_global(row + channel / UNIT, words);
    }
}

#if !PER_CHANNEL

constexpr int GROUPS = (D + GROUP - 1) / GROUP;
// Lanes of a group: a power of two, at most a warp, so that they can shuffle. Each reads
// PARTS times 16 bytes. Where GROUP is no power of two some lanes have nothing to read.
constexpr int NEEDED = power_of_two((GROUP + VEC - 1) / VEC);
constexpr int LANES = NEEDED < 32 ? NEEDED : 32;
constexpr int PARTS = NEEDED / LANES;
// Lanes of a row: whole groups and whole words.
constexpr int WORD_LANES = UNIT > VEC ? UNIT / VEC : 1;
constexpr int ROW_LANES = (GROUPS * LANES + WORD_LANES - 1) / WORD_LANES * WORD_LANES;

extern "C" __global__ void pack_v2(const X* __restrict__ x, S* __restrict__ scale,
                                   S* __restrict__ zero, u32* __restrict__ codes, int N,
                                   int T) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 row = thread / ROW_LANES;
    int group = thread % ROW_LANES / LANES, lane = thread % ROW_LANES % LANES;
    int first = group * GROUP + lane * VEC;  // the first channel that this thread reads
    bool inside = row < (i64)N * T;

    Vec<X, VEC> part[PARTS];
    float low = infinity(), high = -infinity();
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        int channel = first + p * LANES * VEC;
        if (!inside || channel >= D) continue;
        part[p] = load_global<VEC>(x + row * D + channel);
        for (int j = 0; j < VEC; ++j) {
            low = fminf(low, to_float(part[p].v[j]));
            high = fmaxf(high, to_float(part[p].v[j]));
        }
    }
#pragma unroll
    for (int other = LANES / 2; other > 0; other /= 2) {
        low = fminf(low, __shfl_xor_sync(WARP, low, other));
        high = fmaxf(high, __shfl_xor_sync(WARP, high, other));
    }

    S s, z;
    scale_and_zero(low, high, BITS, ASYMMETRIC, &s, &z);
    if (inside && first < D && lane == 0) {
        scale[row * GROUPS + group] = s;
        if (ASYMMETRIC) zero[row * GROUPS + group] = z;
    }
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        int channel = first + p * LANES * VEC;
        u32 code[VEC] = {};
        if (inside && channel < D)
            for (int j = 0; j < VEC; ++j)
                code[j] = to_code(to_float(part[p].v[j]), to_float(s), to_float(z), BITS,
                                  ASYMMETRIC);
        store_codes(codes + row * W, channel, code, inside && channel < PADDED);
    }
}

#else

// Lanes of a row: whole words. A block reads ROWS tokens at a time, PARTS times.
constexpr int ROW_LANES = PADDED / VEC;
constexpr int ROWS = ROW_LANES <= 16 ? 16 : ROW_LANES <= 32 ? 8 : 4;
constexpr int BLOCK = ROWS * ROW_LANES;
constexpr int PARTS = GROUP / ROWS;

// Extremes of VEC channels, in registers.
struct Extremes {
    Vec<X, VEC> low, high;

    __device__ void take(Vec<X, VEC> lows, Vec<X, VEC> highs) {
        for (int j = 0; j < VEC; ++j) {
            round_to(fminf(to_float(low.v[j]), to_float(lows.v[j])), &low.v[j]);
            round_to(fmaxf(to_float(high.v[j]), to_float(highs.v[j])), &high.v[j]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    pack_v2(const X* __restrict__ x, S* __restrict__ scale, S* __restrict__ zero,
            u32* __restrict__ codes, int N, int T) {
    __shared__ alignas(16) X lows[BLOCK * VEC], highs[BLOCK * VEC];
    // A row of these is longer than it need be, so that a warp writes to all the banks.
    __shared__ float scales[VEC][ROW_LANES + 32 / VEC], zeros[VEC][ROW_LANES + 32 / VEC];
    int groups = (T + GROUP - 1) / GROUP;
    int me = threadIdx.x, channel = me % ROW_LANES * VEC;
    i64 t0 = (i64)(blockIdx.x % groups) * GROUP + me / ROW_LANES;
    i64 row = blockIdx.x / groups * (i64)T + t0;

    Vec<X, VEC> part[PARTS];
    Extremes all;
    for (int j = 0; j < VEC; ++j) {
        round_to(infinity(), &all.low.v[j]);
        round_to(-infinity(), &all.high.v[j]);
    }
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        if (t0 + p * ROWS >= T || channel >= D) continue;
        part[p] = load_global<VEC>(x + (row + p * ROWS) * D + channel);
        all.take(part[p], part[p]);
    }
    // The upper half of the rows hands its extremes to the lower half, until one is left.
    store(lows + me * VEC, all.low), store(highs + me * VEC, all.high);
    for (int half = BLOCK / 2; half >= ROW_LANES; half /= 2) {
        __syncthreads();
        if (me < half) {
            int other = (me + half) * VEC;
            all.take(load<VEC>(lows + other), load<VEC>(highs + other));
            store(lows + me * VEC, all.low), store(highs + me * VEC, all.high);
        }
    }
    __syncthreads();

    for (int c = me; c < D; c += BLOCK) {
        S s, z;
        scale_and_zero(to_float(lows[c]), to_float(highs[c]), BITS, ASYMMETRIC, &s, &z);
        scale[(i64)blockIdx.x * D + c] = s;
        if (ASYMMETRIC) zero[(i64)blockIdx.x * D + c] = z;
        scales[c % VEC][c / VEC] = to_float(s);
        zeros[c % VEC][c / VEC] = to_float(z);
    }
    __syncthreads();

    float s[VEC], z[VEC];
    for (int j = 0; j < VEC; ++j)
        s[j] = scales[j][me % ROW_LANES], z[j] = zeros[j][me % ROW_LANES];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        bool active = t0 + p * ROWS < T;
        u32 code[VEC] = {};
        if (active && channel < D)
            for (int j = 0; j < VEC; ++j)
                code[j] = to_code(to_float(part[p].v[j]), s[j], z[j], BITS, ASYMMETRIC);
        store_codes(codes + (row + p * ROWS) * W, channel, code, active);
    }
}

#endif
