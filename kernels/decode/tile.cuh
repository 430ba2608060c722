// What one warp does with one tile of tokens, for HEADS query heads that share a KV
// head. v2 uses it with HEADS = 1, v3 with all heads of a group. With the scores
// S_t = scale q . k_t of the tile, and the state (m, l, o) of all tokens before it,
//
//     m' = max(m, max_t S_t)
//     l' = l exp(m - m') + sum_t exp(S_t - m')
//     o' = o exp(m - m') + sum_t exp(S_t - m') v_t             attention = o / l
//
// A tile is at most 32 consecutive tokens. Their rows are copied to shared memory as they
// are stored, by neighbouring lanes from neighbouring addresses, and read there:
//
//     keys      lane t holds token t and goes through its whole row
//     values    lane (r, u) holds the channels of unit u, of every SLOTS-th token from r on
//
// Constants: HEADS, WARPS of a block, HEAD_DIM (a multiple of 16); KEY_BITS, KEY_GROUP,
// KEY_PER_CHANNEL, KEY_ASYMMETRIC; VALUE_BITS, VALUE_GROUP, VALUE_ASYMMETRIC; X, S.
#pragma once
#include "kvq.cuh"

constexpr int TILE = 32;  // tokens: one for each lane
// A lane adds up values of UNIT channels, for each head. SLOTS lanes share each unit.
constexpr int UNIT = 8, UNITS = HEAD_DIM / UNIT, SLOTS = 32 / UNITS;
#define NOTHING __uint_as_float(0xff800000)  // -inf, the maximum of no scores

constexpr int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }
constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int whole(int n) { return divide_up(n, 4) * 4; }  // a multiple of 16 bytes

// --- rows in shared memory -------------------------------------------------------------
// Rows of `words` words, one after the other, moved `step` words at a time.
template <int words, int widest>
struct Rows {
    static constexpr int step = gcd(words, widest);
    static constexpr int period = words / gcd(words, 32) * 32;
    static constexpr int space = TILE * words + TILE * words / period * step;

    // Where word i of the tile is. After each `period` words `step` words are left out,
    // so that the same word of 32 neighbouring rows is in 32 different banks.
    static __device__ int at(int i) { return i + i / period * step; }
};

// n words from one place to another, by one instruction each way.
template <int n>
__device__ inline void move(u32* to, const u32* from) {
    typedef typename Raw<4 * n>::Type Piece;
    *reinterpret_cast<Piece*>(to) = *reinterpret_cast<const Piece*>(from);
}

// The words i .. i + n - 1 of a tile; i is a multiple of n.
template <class R, int n>
__device__ inline Vec<u32, n> read_words(const u32* tile, int i) {
    constexpr int step = gcd(n, R::step);
    Vec<u32, n> out;
    for (int j = 0; j < n; j += step) {
        Vec<u32, step> part = load<step>(tile + R::at(i + j));
        for (int k = 0; k < step; ++k) out.v[j + k] = part.v[k];
    }
    return out;
}

//     x_hat = s * level + z,  rounded as by the reference: see `affine`
__device__ inline float x_hat(float s, float level, float z) {
    if (sizeof(S) == 2) return fmaf(s, level, z);
    return __fadd_rn(__fmul_rn(s, level), z);
}

// --- one side, keys or values ----------------------------------------------------------
// Where the tokens of one KV head of one sequence are: their rows, scales and zeros.
struct Stored {
    const u32* codes;
    const S *scale, *zero;
    const X* exact;
};

// What a warp holds of a tile in shared memory.
struct Tile {
    u32* words;
    float *scale, *zero;
};

// Words of one access: 16 bytes, but no more codes than there are registers for, and 3
// bits come in threes.
template <int bits>
constexpr int widest() { return bits == 3 ? 1 : bits == 2 ? 2 : 4; }

// Rows of codes, of which `unit` neighbours are read at once.
template <int bits, int group, int per_channel, int asymmetric, int unit_>
struct Coded {
    static constexpr int unit = unit_, units = HEAD_DIM / unit;
    static constexpr int words =
        bits == 3 ? 3 * divide_up(HEAD_DIM, 32) : HEAD_DIM * bits / 32;
    static constexpr int columns =  // scales of a token, or of a group of tokens
        per_channel ? HEAD_DIM : divide_up(HEAD_DIM, group);
    static constexpr int tokens = per_channel ? group : 1;  // of a group
    static constexpr int zeros = asymmetric, offset = zeros ? 0 : 1 << (bits - 1);
    typedef Rows<words, widest<bits>()> R;
    typedef Rows<columns, 1> Scales;
    static constexpr int space = R::space;
    static constexpr int scales = per_channel ? HEAD_DIM : Scales::space;

    // Tokens first .. first + count - 1, of one group if scales are per channel.
    static __device__ void copy(Tile tile, Stored from, i64 first, int count) {
        const u32* rows = from.codes + first * words;
#pragma unroll 4
        for (int i = threadIdx.x % 32; i < count * words / R::step; i += 32)
            move<R::step>(tile.words + R::at(i * R::step), rows + i * R::step);
        i64 start = first / tokens * columns;
        int n = (per_channel ? 1 : count) * columns;
        for (int i = threadIdx.x % 32; i < n; i += 32) {
            tile.scale[Scales::at(i)] = to_float(from.scale[start + i]);
            if (asymmetric) tile.zero[Scales::at(i)] = to_float(from.zero[start + i]);
        }
    }

    // x_hat of unit u of the tile's token t.
    static __device__ Vec<float, unit> read(Tile tile, int t, int u) {
        Vec<float, unit> x = levels(tile.words, t, u * unit);
        for (int i = 0; i < unit; ++i) {
            u32 c = u * unit + i;
            int g = per_channel ? c : Scales::at(t * columns + c / group);
            x.v[i] = x_hat(tile.scale[g], x.v[i], asymmetric ? tile.zero[g] : 0);
        }
        return x;
    }

    // Levels of the channels c .. c + unit - 1 of token t.
    static __device__ Vec<float, unit> levels(const u32* tile, int t, int c) {
        Vec<float, unit> x;
        if (bits == 3) {  // a word of low bits and a word of high bits: see `layouts.py`
            int word = t * words + c / 32 * 3;
            u32 low = tile[R::at(word + c % 32 / 16)] >> (c % 16);
            u32 high = tile[R::at(word + 2)] >> (c % 32 / 2);
            for (int p = 0; p < unit / 2; ++p)
                put(x, p, pair_of_codes<2>(low, p) | pair_of_codes<1>(high, p) << 2);
        } else {
            constexpr int pairs = 16 / bits, n = divide_up(unit, 2 * pairs);  // words
            auto w = read_words<R, n>(tile, t * words + c / (2 * pairs));
            if (unit < 2 * pairs) w.v[0] >>= c % (2 * pairs) / 2 * bits;
            for (int p = 0; p < unit / 2; ++p)
                put(x, p, pair_of_codes<bits>(w.v[p / pairs], p % pairs));
        }
        return x;
    }

    static __device__ void put(Vec<float, unit>& x, int p, u32 codes) {
        float2 pair = pair_of_levels(codes, offset);
        x.v[2 * p] = pair.x;
        x.v[2 * p + 1] = pair.y;
    }
};

// Rows in full precision: a tile holds them as float32, and fewer of them.
struct Exact {
    static constexpr int unit = UNIT, units = UNITS;
    typedef Rows<HEAD_DIM, 4> R;

    static __device__ void copy(Tile tile, Stored from, i64 first, int count) {
        const X* rows = from.exact + first * HEAD_DIM;
#pragma unroll 4
        for (int i = threadIdx.x % 32; i < count * HEAD_DIM; i += 32)
            tile.words[R::at(i)] = __float_as_uint(to_float(rows[i]));
    }

    static __device__ Vec<float, unit> read(Tile tile, int t, int u) {
        Vec<float, unit> x;
        auto w = read_words<R, unit>(tile.words, t * HEAD_DIM + u * unit);
        for (int i = 0; i < unit; ++i) x.v[i] = __uint_as_float(w.v[i]);
        return x;
    }
};

// Keys are read in the widest accesses that their rows allow.
constexpr int KEY_WORDS = gcd(HEAD_DIM * KEY_BITS / 32, widest<KEY_BITS>());
constexpr int KEY_UNIT = KEY_BITS == 3 ? 16 : 32 / KEY_BITS * KEY_WORDS;
typedef Coded<KEY_BITS, KEY_GROUP, KEY_PER_CHANNEL, KEY_ASYMMETRIC, KEY_UNIT> Keys;
typedef Coded<VALUE_BITS, VALUE_GROUP, 0, VALUE_ASYMMETRIC, UNIT> Values;

// Words and scales of a warp's tile. It has room for 4 tokens in full precision at least.
constexpr int SPACE =
    whole(larger(4 * (HEAD_DIM + 4), larger(Keys::space, Values::space)));
constexpr int SCALES = whole(larger(Keys::scales, Values::scales));
constexpr int EXACT_TILE = SPACE / (HEAD_DIM + 4) < TILE ? SPACE / (HEAD_DIM + 4) : TILE;

// What a block has in shared memory.
struct Shared {
    alignas(16) float q[HEADS * HEAD_DIM];
    alignas(16) u32 words[WARPS][SPACE];
    alignas(16) float scale[WARPS][SCALES], zero[WARPS][SCALES];
    float o[HEADS * HEAD_DIM];
    float m[HEADS][WARPS], l[HEADS][WARPS];
};

__device__ inline Tile tile_of_warp(Shared& shared) {
    int warp = threadIdx.x / 32;
    return {shared.words[warp], shared.scale[warp], shared.zero[warp]};
}

// The tokens of one KV head of one sequence: number `head` = b H_kv + g.
template <class Side>
__device__ inline Stored stored(const u32* codes, const S* scale, const S* zero,
                                const X* exact, i64 head, int T_cap, int R_cap) {
    i64 groups = Side::columns * ceil_div(T_cap, Side::tokens) * head;
    return {codes + head * T_cap * Side::words, scale + groups,
            Side::zeros ? zero + groups : zero, exact + head * R_cap * HEAD_DIM};
}

// --- the equations ---------------------------------------------------------------------
// The state (m, l, o) of the tokens that this lane's warp has seen. A lane has the part of
// l that its own tokens gave, and the part of o of its unit and slot.
struct State {
    float m[HEADS], l[HEADS], o[HEADS][UNIT];
};

__device__ inline State nothing_seen() {
    State state;
    for (int h = 0; h < HEADS; ++h) {
        state.m[h] = NOTHING;
        state.l[h] = 0;
        for (int i = 0; i < UNIT; ++i) state.o[h][i] = 0;
    }
    return state;
}

struct Options {
    float scale, softcap;
};

//     S_t = scale q . k_t,  with a soft cap: softcap tanh(S_t / softcap)
//
// t is the lane; beyond `count` there is no token: -inf.
template <class K>
__device__ inline void scores(Tile tile, const float* q, int count, Options options,
                              float (&s)[HEADS]) {
    int t = threadIdx.x % 32;
    for (int h = 0; h < HEADS; ++h) s[h] = t < count ? 0 : NOTHING;
    if (t >= count) return;
#pragma unroll 1  // all units at once would not fit the instruction cache
    for (int u = 0; u < K::units; ++u) {
        auto k = K::read(tile, t, u);
        for (int h = 0; h < HEADS; ++h) {
            float part[4] = {};  // short sums: their rounding errors stay small
            for (int i = 0; i < K::unit; ++i)
                part[i % 4] = fmaf(q[h * HEAD_DIM + u * K::unit + i], k.v[i], part[i % 4]);
            s[h] += (part[0] + part[1]) + (part[2] + part[3]);
        }
    }
    for (int h = 0; h < HEADS; ++h) {
        s[h] *= options.scale;
        if (options.softcap > 0) s[h] = options.softcap * tanhf(s[h] / options.softcap);
    }
}

__device__ inline float largest_of_warp(float x) {
    for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(WARP, x, i));
    return x;
}

__device__ inline float sum_of_warp(float x) {
    for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(WARP, x, i);
    return x;
}

//     m' = max(m, max_t S_t)     l' = l exp(m - m') + sum_t exp(S_t - m')     o exp(m - m')
//
// s[h] becomes p_t = exp(S_t - m').
__device__ inline void rescale(State& state, float (&s)[HEADS]) {
    for (int h = 0; h < HEADS; ++h) {
        float m = fmaxf(state.m[h], largest_of_warp(s[h]));
        float shrink = expf(state.m[h] - m);
        s[h] = expf(s[h] - m);
        state.m[h] = m;
        state.l[h] = state.l[h] * shrink + s[h];
        for (int i = 0; i < UNIT; ++i) state.o[h][i] *= shrink;
    }
}

//     o' = o + sum_t p_t v_t
//
// Lane t has p_t: whoever needs it takes it from there.
template <class V>
__device__ inline void add_values(Tile tile, int count, float (&p)[HEADS], State& state) {
    int slot = threadIdx.x % 32 / UNITS, u = threadIdx.x % 32 % UNITS;
    for (int first = 0; first < count; first += SLOTS) {
        int t = first + slot;
        float weight[HEADS];
        for (int h = 0; h < HEADS; ++h) weight[h] = __shfl_sync(WARP, p[h], t % 32);
        if (slot >= SLOTS || t >= count) continue;
        auto v = V::read(tile, t, u);
        for (int h = 0; h < HEADS; ++h)
            for (int i = 0; i < UNIT; ++i)
                state.o[h][i] = fmaf(weight[h], v.v[i], state.o[h][i]);
    }
}

// The tokens first .. first + count - 1 join the state. Keys and values use the same
// shared memory one after the other; __syncwarp keeps copying and reading apart.
template <class K, class V>
__device__ inline void attend_tile(Shared& shared, Stored keys, Stored values, i64 first,
                                   int count, Options options, State& state) {
    Tile tile = tile_of_warp(shared);
    float p[HEADS];
    __syncwarp();
    K::copy(tile, keys, first, count);
    __syncwarp();
    scores<K>(tile, shared.q, count, options, p);
    rescale(state, p);
    __syncwarp();
    V::copy(tile, values, first, count);
    __syncwarp();
    add_values<V>(tile, count, p, state);
}

// --- the tokens of a block -------------------------------------------------------------
// Tiles go to the warps in turn. No tile has tokens of two groups of keys per channel:
// the scales of a tile are then one row.
constexpr int SPAN = KEY_PER_CHANNEL ? KEY_GROUP : TILE;
constexpr int TILES = divide_up(SPAN, TILE);  // of a span

// Quantized tokens begin .. end - 1; begin is a multiple of SPAN.
__device__ inline void attend_coded(Shared& shared, Stored keys, Stored values, int begin,
                                    int end, Options options, State& state) {
    int tiles = divide_up(end - begin, SPAN) * TILES;
    for (int i = threadIdx.x / 32; i < tiles; i += WARPS) {
        int span = begin + i / TILES * SPAN, first = span + i % TILES * TILE;
        int count = min(min(first + TILE, span + SPAN), end) - first;
        if (count > 0)
            attend_tile<Keys, Values>(shared, keys, values, first, count, options, state);
    }
}

// Full-precision tokens begin .. end - 1.
__device__ inline void attend_exact(Shared& shared, Stored keys, Stored values, int begin,
                                    int end, Options options, State& state) {
    for (int i = threadIdx.x / 32; begin + i * EXACT_TILE < end; i += WARPS) {
        int first = begin + i * EXACT_TILE, count = min(EXACT_TILE, end - first);
        attend_tile<Exact, Exact>(shared, keys, values, first, count, options,
                                  state);
    }
}

// q of `heads` neighbouring heads, as float32; the rest of shared.q is 0.
__device__ inline void read_queries(Shared& shared, const X* q, int heads) {
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += blockDim.x)
        shared.q[i] = i < heads * HEAD_DIM ? to_float(q[i]) : 0;
    __syncthreads();
}

// --- one state for the block -----------------------------------------------------------
// exp(m - M), the weight of a part with the maximum m: 0 for one that has seen nothing.
__device__ inline float weight_of(float m, float M) {
    return m == NOTHING ? 0.0f : expf(m - M);
}

//     M = max_w m_w
__device__ inline float largest_of_block(const Shared& shared, int h) {
    float M = NOTHING;
    for (int w = 0; w < WARPS; ++w) M = fmaxf(M, shared.m[h][w]);
    return M;
}

//     l = sum_w l_w exp(m_w - M)
__device__ inline float sum_of_block(const Shared& shared, int h, float M) {
    float l = 0;
    for (int w = 0; w < WARPS; ++w) l += shared.l[h][w] * weight_of(shared.m[h][w], M);
    return l;
}

// Where o of channel c = u UNIT + i is: neighbouring units in neighbouring banks.
__device__ inline int place_of(int h, int c) {
    return (h * UNIT + c % UNIT) * UNITS + c / UNIT;
}

//     o = sum_w o_w exp(m_w - M)
//
// One slot of one warp after the other adds its part: the order of the sum is always the
// same. Afterwards m and l of every warp, and o of the block, are in `shared`.
__device__ inline void merge_warps(Shared& shared, const State& state) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int slot = lane / UNITS, u = lane % UNITS;
    for (int h = 0; h < HEADS; ++h) {
        float l = sum_of_warp(state.l[h]);
        if (lane == 0) {
            shared.m[h][warp] = state.m[h];
            shared.l[h][warp] = l;
        }
    }
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += blockDim.x) shared.o[i] = 0;
    __syncthreads();
    for (int turn = 0; turn < WARPS * SLOTS; ++turn) {
        if (slot < SLOTS && turn == warp * SLOTS + slot)
            for (int h = 0; h < HEADS; ++h) {
                float weight = weight_of(state.m[h], largest_of_block(shared, h));
                for (int i = 0; i < UNIT; ++i)
                    shared.o[place_of(h, u * UNIT + i)] += state.o[h][i] * weight;
            }
        __syncthreads();
    }
}
