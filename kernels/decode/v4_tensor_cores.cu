// Decode attention, fourth version: the two products are done by tensor cores.
//
//     S^T = K q^T     O^T = V^T P^T     attention = O / l,  l = sum_t p_t
//
// The idea: the cache is the left matrix. A page of 64 tokens is stored in the order in
// which the tensor cores want it (`pages.py`), the 8 columns are query heads, and scales
// are never multiplied into codes but into q, S and P, which are small (`attend.cuh`).
//
// decode_v4: block ((split B + b) H_kv + g) CHUNKS + chunk, of 32 WARPS threads; a split is
// `pages_per_split` consecutive pages of a sequence, those with codes first, then those in
// full precision. Its warps take pages in turn.
// decode_v4_merge: block b H_q + h, of any number of threads.
//
// Arrays: q (B, H_q, D); pages (number, H_kv, record) and exact_pages likewise, 16-byte
// pieces; table (B, P_cap + E_cap), the page numbers of a sequence: P_cap of pages, E_cap
// of exact_pages; lengths (B, 2), tokens of both kinds; largest (B, H_kv, 2), the largest
// scale of its keys and of its values; part_o (splits, B, H_q, D), part_ml (splits, B,
// H_q, 2); sink_logits (H_q); out (B, H_q, D). What a page has behind its last token must
// be finite.
//
// Constants: those of `fragments.cuh`.
#include "attend.cuh"

struct Shared {
    float o[HEADS][HEAD_DIM + 4];  // a row starts 4 banks after the one before
    float m[WARPS][HEADS], l[WARPS][HEADS];
};

// 2^(m - M), the weight of a part: 0 for one that has seen nothing.
__device__ inline float weight_of(float m, float M) {
    return m == NOTHING ? 0.0f : exp2f(m - M);
}

__device__ inline float largest_of_block(const Shared& shared, int h) {
    float M = NOTHING;
    for (int w = 0; w < WARPS; ++w) M = fmaxf(M, shared.m[w][h]);
    return M;
}

//     o = sum_w o_w 2^(m_w - M),   one warp after the other: always the same order
__device__ inline void merge_warps(Shared& shared, State& s) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < TILES; ++i)
        for (int h = 0; h < 2 && g == 0; ++h) {
            shared.m[warp][8 * i + 2 * t + h] = s.m[i][h];
            shared.l[warp][8 * i + 2 * t + h] = s.l[i][h];
        }
    for (int j = threadIdx.x; j < HEADS * HEAD_DIM; j += blockDim.x)
        shared.o[j / HEAD_DIM][j % HEAD_DIM] = 0;
    for (int turn = 0; turn < WARPS; ++turn) {
        __syncthreads();
        if (turn != warp) continue;
        for (int i = 0; i < TILES; ++i)
            for (int r = 0; r < 4; ++r) {
                int h = 8 * i + 2 * t + r % 2;
                float weight = weight_of(s.m[i][r % 2], largest_of_block(shared, h));
                for (int d = 0; d < BLOCKS; ++d) {
                    int c = 16 * d + r / 2 * 8 + g;
                    shared.o[h][c] += s.o[i][d][r] * weight;
                }
            }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT / WARPS)
    decode_v4(const X* q, const uint4* pages, const uint4* exact_pages, const int* table,
              const int* lengths, const float* largest, float* part_o, float* part_ml,
              int B, int H_q, int H_kv, int P_cap, int E_cap, float scale, float softcap,
              int pages_per_split) {
    __shared__ Shared shared;
    int chunk = blockIdx.x % CHUNKS, g = blockIdx.x / CHUNKS % H_kv;
    int b = blockIdx.x / CHUNKS / H_kv % B, split = blockIdx.x / CHUNKS / H_kv / B;
    int h = g * RATIO + chunk * HEADS, heads = min(HEADS, RATIO - chunk * HEADS);
    Query query = read_query(q + ((i64)b * H_q + h) * HEAD_DIM, heads,
                             largest + 2 * ((i64)b * H_kv + g), scale, softcap);
    State state = nothing_seen();

    const int* row = table + (i64)b * (P_cap + E_cap);
    int coded = lengths[2 * b], exact = lengths[2 * b + 1], here = divide_up(coded, PAGE);
    int n = split * pages_per_split + threadIdx.x / 32, end = (split + 1) * pages_per_split;
    if constexpr (Keys::coded) {
        for (; n < min(end, here); n += WARPS)
            attend_page<Keys, Values>(
                pages + ((i64)row[n] * H_kv + g) * Record<Keys, Values>::size,
                coded - n * PAGE, query, state);
    }
    finish(query);
    finish(state);
    for (; n < min(end, here + divide_up(exact, STEP)); n += WARPS) {
        i64 place = row[P_cap + n - here];
        attend_page<Exact, Exact>(
            exact_pages + (place * H_kv + g) * Record<Exact, Exact>::size,
            exact - (n - here) * STEP, query, state);
    }
    merge_warps(shared, state);

    i64 first = ((i64)split * B + b) * H_q + h;
    for (int i = threadIdx.x; i < heads * HEAD_DIM; i += blockDim.x)
        part_o[first * HEAD_DIM + i] = shared.o[i / HEAD_DIM][i % HEAD_DIM];
    if (threadIdx.x < heads) {
        float M = largest_of_block(shared, threadIdx.x), l = 0;
        for (int w = 0; w < WARPS; ++w)
            l += shared.l[w][threadIdx.x] * weight_of(shared.m[w][threadIdx.x], M);
        part_ml[2 * (first + threadIdx.x)] = M;
        part_ml[2 * (first + threadIdx.x) + 1] = l;
    }
}

// A sink logit takes part in M and l, and has no value. No token at all gives 0.
extern "C" __global__ void decode_v4_merge(const float* part_o, const float* part_ml,
                                           const float* sink_logits, float* out, int B,
                                           int H_q, int splits, int has_sink) {
    i64 row = blockIdx.x, rows = (i64)B * H_q;
    constexpr float log2e = 1.4426950408889634f;
    float sink = has_sink ? log2e * sink_logits[row % H_q] : NOTHING, M = sink;
    for (int i = 0; i < splits; ++i) M = fmaxf(M, part_ml[2 * (i * rows + row)]);
    float l = weight_of(sink, M);
    for (int i = 0; i < splits; ++i) {
        const float* ml = part_ml + 2 * (i * rows + row);
        l += ml[1] * weight_of(ml[0], M);
    }
    for (int c = threadIdx.x; c < HEAD_DIM; c += blockDim.x) {
        float o = 0;
        for (int i = 0; i < splits; ++i)
            o += part_o[(i * rows + row) * HEAD_DIM + c]
                 * weight_of(part_ml[2 * (i * rows + row)], M);
        out[row * HEAD_DIM + c] = l > 0 ? o / l : 0;
    }
}
