// One warp, one step of tokens, up to 16 query heads: the equations of `fragments.cuh`.
//
//     S_t = q . k_t       p_t = 2^(c S_t - m)       l += sum_t p_t       o += sum_t p_t v_t
//
// attention = o / l for any m: it only has to keep p_t and o within the range of their
// types. m follows the largest score, and never lags behind by more than SLACK.
#pragma once
#include "fragments.cuh"

constexpr int SLACK = 8;  // of p, as a power of two
constexpr int ROOM = 15;  // p, and p times a scale, stay below 2^ROOM: binary16
constexpr int VALUE_GROUPS = Values::columns;
// Sums of zeros: two groups share one, a group alone takes two (`add_values`).
constexpr int ZEROS = (VALUE_GROUPS + 1) / 2 + (VALUE_GROUPS == 1);

// What a lane knows of the queries. Heads are columns: g of B, 2t and 2t + 1 of C.
struct Query {
    u32 q[TILES][BLOCKS][2];         // B, times a power of two: see `read_query`
    // Keys per token: sum_c q_c of a group of channels, as in C, and what the sum over
    // codes starts with.
    float sum[TILES][Keys::columns][2], start[TILES][Keys::columns][2];
    u32 ones[4];                     // A
    float c, inverse_cap, headroom;  // see `read_query`
};

// The state of the tokens seen, as C: rows of o are channels, those of l all the same.
struct State {
    float o[TILES][BLOCKS][4];
    float zero[TILES][ZEROS][4], lifted[TILES][VALUE_GROUPS][4];  // see `add_values`
    float m[TILES][2], l[TILES][4];
};

__device__ inline State nothing_seen() {
    State s = {};
    for (auto& m : s.m) m[0] = m[1] = NOTHING;
    return s;
}

// --- S^T = K q^T -----------------------------------------------------------------------
// q 4^k, exactly: what 1 + code / 4^k has to be multiplied by.
__device__ inline void lift(int d, u32 (&q)[2], int sign = 1) {
    for (int r = 0; r < 2; ++r) {
        float power = fourth_power(place<Keys>(d, 2 * r));
        q[r] = multiply(q[r], both(sign > 0 ? power : 1 / power));
    }
}

//     sum_c q_c (s_c level + z_c) = sum_c (q_c s_c) level + sum_c q_c z_c
//
// Keys per channel: the scale goes into q, once for a group of tokens. The second sum is
// the same for all tokens: A with z in every row. 16 bytes of zeros are such an A for two
// blocks of channels, one in the rows below 8, the other in the rows from 8 on; of each
// product one half is of use.
//
// Lifted codes: q 4^k (1 + code / 4^k) is q code + q 4^k, and the second part is taken back
// at once. Without zeros a level is code - offset: q offset s, as it was rounded, too.
__device__ inline void fold(const uint4* scale, const uint4* zero, const Query& query,
                            u32 (&q)[TILES][BLOCKS][2], float (&start)[TILES][4]) {
    int t = threadIdx.x % 4;
    float low[TILES][4] = {}, high[TILES][4] = {}, lifted[TILES][4] = {};
#pragma unroll
    for (int d = 0; d < BLOCKS; ++d) {
        uint4 s, z;
        if (d % 2 == 0) s = scale[d / 2 * 4 + t];
        if (d % 2 == 0 && Keys::asymmetric) z = zero[d / 2 * 4 + t];
        for (int i = 0; i < TILES; ++i) {
            for (int r = 0; r < 2; ++r)
                q[i][d][r] = multiply(query.q[i][d][r], word(s, 2 * r + d % 2));
            if (Keys::asymmetric)
                mma(d % 2 ? high[i] : low[i], {z.x, z.y, z.z, z.w}, query.q[i][d]);
            else if (Keys::lifted) mma(low[i], query.ones, q[i][d]);
            if (!Keys::lifted) continue;
            lift(d, q[i][d]);
            mma(lifted[i], query.ones, q[i][d]);
        }
    }
    constexpr float sign = Keys::asymmetric ? 1 : -Keys::offset;
    for (int i = 0; i < TILES; ++i)
        for (int r = 0; r < 4; ++r)
            start[i][r] = sign * (low[i][r % 2] + high[i][2 + r % 2]) - lifted[i][r];
}

//     sum_c q_c (s level + z) = s sum_c q_c level + z sum_c q_c
//
// Keys per token: scale and zero go onto the sum of a group of channels, rows g and g + 8.
__device__ inline void scale_sum(u32 scale, u32 zero, const float (&sum)[4],
                                 const float (&q)[2], float (&S)[4]) {
    float2 s = __half22float2(halves(scale)), z = __half22float2(halves(zero));
    for (int r = 0; r < 4; ++r) {
        S[r] = fmaf(r < 2 ? s.x : s.y, sum[r], S[r]);
        if (Keys::asymmetric) S[r] = fmaf(r < 2 ? z.x : z.y, q[r % 2], S[r]);
    }
}

// 16 tokens x 16 channels of keys, a, join the scores of these tokens. q: times the scale,
// for keys per channel. `sum`: of the channels of a group so far, for keys per token.
template <class K>
__device__ inline void add_keys(const u32 (&a)[4], int d, const u32 (&q)[2], u32 scale,
                                u32 zero, const Query& query, int i, float (&sum)[4],
                                float (&S)[4]) {
    if (!K::coded) return mma<BFLOAT<K>>(S, a, query.q[i][d]);
    if (K::per_channel) return mma(S, a, q);
    int j = d * 16 / K::group;
    if (d * 16 % K::group == 0)
        for (int r = 0; r < 4; ++r) sum[r] = query.start[i][j][r % 2];
    mma(sum, a, query.q[i][d]);
    if ((d + 1) * 16 % K::group == 0) scale_sum(scale, zero, sum, query.sum[i][j], S);
}

template <class K, class V>
__device__ inline void scores(const uint4* head, const uint4* codes, const Query& query,
                              float (&S)[TILES][K::tokens / 16][4]) {
    typedef Record<K, V> R;
    int lane = threadIdx.x % 32, g = lane / 4;
    u32 q[TILES][BLOCKS][2];
    float start[TILES][4] = {}, sum[TILES][4];
    uint4 unit, scale[K::columns], zero[K::columns];
    for (int j = 0; j < K::columns && K::coded && !K::per_channel; ++j) {
        scale[j] = head[j * 8 + g];
        if (K::asymmetric) zero[j] = head[R::key_zero + j * 8 + g];
    }
#pragma unroll
    for (int b = 0; b < K::tokens / 16; ++b) {  // 16 tokens
        if (K::per_channel && b * 16 % K::group == 0) {
            int row = K::group < STEP ? b * 16 / K::group * (HEAD_DIM / 8) : 0;
            fold(head + row, head + R::key_zero + row, query, q, start);
        }
        for (int i = 0; i < TILES; ++i)
            for (int r = 0; r < 4; ++r) S[i][b][r] = start[i][r];
#pragma unroll
        for (int d = 0; d < BLOCKS; ++d) {  // 16 channels
            int f = b * BLOCKS + d, j = d * 16 / K::group;
            if (f % K::fragments == 0) unit = codes[f / K::fragments * 32 + lane];
            u32 a[4];
            fragment<K>(unit, f % K::fragments, a);
            for (int i = 0; i < TILES; ++i)
                add_keys<K>(a, d, q[i][d], word(scale[j], b), word(zero[j], b), query, i,
                            sum[i], S[i][b]);
        }
    }
}

// --- softmax ---------------------------------------------------------------------------
// Rows at and beyond `count` of the step are no tokens.
template <int N>
__device__ inline void mask(float (&S)[TILES][N][4], int count) {
    int g = threadIdx.x % 32 / 4;
    for (int b = 0; b < N; ++b)
        for (int r = 0; r < 4; ++r)
            for (int i = 0; i < TILES; ++i)
                if (b * 16 + r / 2 * 8 + g >= count) S[i][b][r] = NOTHING;
}

// The largest score of each head: over the rows of this lane, then over all rows.
template <int N>
__device__ inline void largest_of_heads(const float (&S)[TILES][N][4],
                                        float (&top)[TILES][2]) {
    for (int i = 0; i < TILES; ++i)
        for (int h = 0; h < 2; ++h) {
            float x = NOTHING;
            for (int b = 0; b < N; ++b) x = fmaxf(x, fmaxf(S[i][b][h], S[i][b][h + 2]));
            for (int lanes = 4; lanes < 32; lanes *= 2)
                x = fmaxf(x, __shfl_xor_sync(WARP, x, lanes));
            top[i][h] = x;
        }
}

//     m' = max(m, c max_t S_t - headroom)     l' = l 2^(m - m')     o' = o 2^(m - m')
//
// Only where p would exceed 2^(headroom + SLACK): most steps do not change m.
__device__ inline void rescale(State& s, const float (&top)[TILES][2], const Query& query) {
    bool grown = false;
    for (int i = 0; i < TILES; ++i)
        for (int h = 0; h < 2; ++h)
            grown |= top[i][h] * query.c > s.m[i][h] + (query.headroom + SLACK);
    if (!__any_sync(WARP, grown)) return;
    for (int i = 0; i < TILES; ++i)
        for (int h = 0; h < 2; ++h) {
            float m = fmaxf(s.m[i][h], top[i][h] * query.c - query.headroom);
            float shrink = power_of_two(s.m[i][h] - m);
            s.m[i][h] = m;
            s.l[i][h] *= shrink, s.l[i][h + 2] *= shrink;
            for (auto& o : s.o[i]) o[h] *= shrink, o[h + 2] *= shrink;
            for (auto& x : s.zero[i]) x[h] *= shrink, x[h + 2] *= shrink;
            for (auto& x : s.lifted[i]) x[h] *= shrink, x[h + 2] *= shrink;
        }
}

//     p_t = 2^(c S_t - m)     l += sum_t p_t
//
// Of 16 tokens, turned from C (rows are tokens) into B. l is the sum of p as o gets it,
// rounded: what a rounding adds to p it adds to both.
template <bool bfloat>
__device__ inline void probabilities(const float (&S)[4], const Query& query,
                                     const float (&m)[2], float (&l)[4], u32 (&p)[2]) {
    float x[4];
    for (int r = 0; r < 4; ++r) x[r] = power_of_two(fmaf(S[r], query.c, -m[r % 2]));
    p[0] = transposed(pair<bfloat>(x[0], x[1]));
    p[1] = transposed(pair<bfloat>(x[2], x[3]));
    mma<bfloat>(l, query.ones, p);
}

// --- O^T += V^T P^T --------------------------------------------------------------------
//     sum_t p_t (s_t level + z_t) = sum_t (p_t s_t) level + sum_t p_t z_t
//
// Values per token: the scale goes into p, once for a group of channels. The second sum is
// the same for all channels of the group: A with z in every row, as in `fold`. Lifted codes
// leave sum_t p_t s_t too much in o: `finish` takes it off. Both sums grow alike, and so do
// the errors of adders that truncate.
template <class K, class V>
__device__ inline void add_values(const uint4* step, const Query& query,
                                  const float (&S)[TILES][V::tokens / 16][4], State& s) {
    typedef Record<K, V> R;
    int lane = threadIdx.x % 32, t = lane % 4;
    const uint4* codes = step + R::values + lane;
    uint4 unit, scale, zero;
#pragma unroll
    for (int b = 0; b < V::tokens / 16; ++b) {  // 16 tokens
        u32 p[TILES][2], scaled[TILES][2];
        for (int i = 0; i < TILES; ++i)
            probabilities<BFLOAT<V>>(S[i][b], query, s.m[i], s.l[i], p[i]);
#pragma unroll
        for (int d = 0; d < BLOCKS; ++d) {  // 16 channels
            int f = b * BLOCKS + d, j = d * 16 / V::group;
            if (V::coded && d * 16 % V::group == 0) {
                int u = b * V::columns + j;  // 2 of them in 16 bytes
                if (u % 2 == 0) scale = step[R::value_scale + u / 2 * 4 + t];
                if (u % 2 == 0 && V::asymmetric) zero = step[R::value_zero + u / 2 * 4 + t];
                for (int i = 0; i < TILES; ++i) {
                    for (int r = 0; r < 2; ++r)
                        scaled[i][r] = multiply(p[i][r], word(scale, 2 * r + u % 2));
                    if (V::asymmetric && (V::columns == 1 || u % 2 == 0))
                        mma(s.zero[i][V::columns == 1 ? u % 2 : j / 2],
                            {zero.x, zero.y, zero.z, zero.w}, p[i]);
                    if (V::lifted) mma(s.lifted[i][j], query.ones, scaled[i]);
                }
            }
            if (f % V::fragments == 0) unit = codes[f / V::fragments * 32];
            u32 a[4];
            fragment<V>(unit, f % V::fragments, a);
            for (int i = 0; i < TILES; ++i)
                mma<BFLOAT<V>>(s.o[i][d], a, V::coded ? scaled[i] : p[i]);
        }
    }
}

// Two binary16 numbers as two of type E.
__device__ inline u32 to_numbers(u32 x) {
    float2 two = __half22float2(halves(x));
    return BFLOAT<Exact> ? pair<true>(two.x, two.y) : x;
}

// After the last page with codes, numbers come as they are: q for them again, in E.
__device__ inline void finish(Query& query) {
    for (auto& tile : query.q)
        for (int d = 0; d < BLOCKS; ++d) {
            if (!Keys::per_channel && Keys::lifted) lift(d, tile[d], -1);
            for (u32& q : tile[d]) q = to_numbers(q);
        }
    for (u32& one : query.ones) one = to_numbers(one);
}

//     o = 4^k (o - (1 + offset / 4^k) sum_t p_t s_t) + sum_t p_t z_t
//
// And o becomes that of numbers.
__device__ inline void finish(State& s) {
    for (int i = 0; i < TILES; ++i)
        for (int d = 0; d < BLOCKS; ++d)
            for (int r = 0; r < 4; ++r) {
                int j = d * 16 / Values::group, h = r % 2;
                float& o = s.o[i][d][r];
                float power = fourth_power(place<Values>(d, r / 2));
                if (Values::lifted)
                    o = power * o - (power + Values::offset) * s.lifted[i][j][r];
                const auto& z = s.zero[i];
                if (Values::asymmetric)
                    o += VALUE_GROUPS == 1 ? z[0][h] + z[1 % ZEROS][2 + h]
                                           : z[j / 2][j % 2 * 2 + h];
            }
}

// The tokens of one step of a page join the state; its first `count` rows are tokens. head:
// scales and zeros of the page's keys.
template <class K, class V>
__device__ inline void attend_step(const uint4* head, const uint4* step, int count,
                                   const Query& query, State& s) {
    float S[TILES][K::tokens / 16][4], top[TILES][2];
    scores<K, V>(head, step, query, S);
    if (SOFTCAP)
        for (auto& tile : S)
            for (auto& block : tile)
                for (float& x : block) x = tanhf(x * query.inverse_cap);
    if (count < K::tokens) mask(S, count);
    largest_of_heads(S, top);
    rescale(s, top, query);
    add_values<K, V>(step, query, S, s);
}

template <class K, class V>
__device__ inline void attend_page(const uint4* page, int count, const Query& query,
                                   State& s) {
    typedef Record<K, V> R;
#pragma unroll 1
    for (int i = 0; i < R::in_page && i * K::tokens < count; ++i)
        attend_step<K, V>(page, page + R::steps + i * R::step, count - i * K::tokens, query,
                          s);
}

// --- q and the powers of two -----------------------------------------------------------
// The power of two that takes x, 0 < x, into [2^(n-1), 2^n).
__device__ inline float power_for(float x, int n) {
    int exponent = (__float_as_int(x) >> 23) - 126;  // x < 2^exponent
    return __int_as_float((127 + n - min(max(exponent, -100), 100)) << 23);
}

// Keys per token: q 4^k for lifted codes, and what has to be taken off, for each group.
__device__ inline void sums_of_groups(Query& query, int i) {
    constexpr int n = BLOCKS / Keys::columns;  // blocks of a group
    for (int j = 0; j < Keys::columns; ++j) {
        float sum[4] = {}, lifted[4] = {};
        for (int d = j * n; d < (j + 1) * n; ++d) {
            u32(&q)[2] = query.q[i][d];
            mma(sum, query.ones, q);
            if (!Keys::lifted) continue;
            lift(d, q);
            mma(lifted, query.ones, q);
        }
        for (int h = 0; h < 2; ++h) {
            query.sum[i][j][h] = sum[h];
            query.start[i][j][h] = Keys::lifted ? -lifted[h] - Keys::offset * sum[h] : 0;
        }
    }
}

// q of `heads` neighbouring heads. A scale of keys may be as large as binary16 goes, and
// so q s might not fit: q is stored times a power of two that keeps q and q s of the block
// below 2^(ROOM - 1), and c takes it back. `largest`: the largest scale of the keys and of
// the values of this KV head. headroom does the same for p s.
__device__ inline Query read_query(const X* q, int heads, const float* largest, float scale,
                                   float softcap) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float x[TILES][BLOCKS][2][2] = {}, most = 0;
    for (int i = 0; i < TILES; ++i)
        for (int d = 0; d < BLOCKS && 8 * i + g < heads; ++d)
            for (int r = 0; r < 2; ++r) {
                auto two = load<2>(q + (8 * i + g) * HEAD_DIM + 16 * d + 8 * r + 2 * t);
                for (int j = 0; j < 2; ++j) {
                    x[i][d][r][j] = to_float(two.v[j]);
                    most = fmaxf(most, fabsf(x[i][d][r][j]));
                }
            }
    for (int lanes = 16; lanes > 0; lanes /= 2)
        most = fmaxf(most, __shfl_xor_sync(WARP, most, lanes));
    constexpr int room = ROOM - 1 - (Keys::lifted ? 8 : 0);  // q 4^k has to fit as well
    float factor = power_for(most * fmaxf(largest[0], 1), room);
    if (scale < 0) factor = -factor;  // so that c > 0: the largest S is that of S c
    Query query = {};
    // The compiler does not know that these are four equal numbers, and so it keeps them in
    // four registers: A of ones, without a move before each product.
    float one = fabsf(factor);
    for (int r = 0; r < 4; ++r) query.ones[r] = both(one / one), one += 1;
    for (int i = 0; i < TILES; ++i) {
        for (int d = 0; d < BLOCKS; ++d)
            for (int r = 0; r < 2; ++r)
                query.q[i][d][r] =
                    pair(x[i][d][r][0] * factor, x[i][d][r][1] * factor);
        if (!Keys::per_channel) sums_of_groups(query, i);
    }
    constexpr float log2e = 1.4426950408889634f;
    float c = fmaxf(scale / factor, 1e-30f);  // not 0: 0 times -inf is NaN
    query.inverse_cap = SOFTCAP ? c / softcap : 0;
    query.c = log2e * (SOFTCAP ? softcap : c);
    query.headroom = log2f(power_for(fmaxf(largest[1], 0.5f), ROOM - SLACK));
    return query;
}
