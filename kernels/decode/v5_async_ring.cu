// Decode attention, fifth version: every warp keeps its own pages on their way, and one
// launch does everything.
//
//     M = max_i m_i     l = sum_i l_i 2^(m_i - M)     o = sum_i o_i 2^(m_i - M)
//
// The idea: no warp ever waits for another one. A warp has a ring of STAGES steps in shared
// memory. While it works on one step, the copies of the next ones run: cp.async, 16 bytes
// of a lane each, which that lane reads again. And all steps of all sequences and heads are
// one list, of which each warp takes an equal piece: `offsets` says where in the list the
// steps of a row (sequence b, KV head g, chunk) begin. A piece may end one row and begin
// the next; each part of a row leaves its state in a slot of its own. The warp that comes
// last merges the parts of a row, in their order: so the result is always the same.
//
// decode_v5: blocks of 32 WARPS threads, as many as there are pieces of `steps_per_warp`.
// Arrays: as for v4; offsets (rows + 1), rows = B H_kv CHUNKS; a row without tokens has one
// step of no tokens. part_o (warps + rows, HEADS, D), part_ml (warps + rows, HEADS, 2);
// arrived (rows), zeros, and zeros again at the end.
//
// Constants: those of `fragments.cuh`, and STAGES.
#include "attend.cuh"

// What goes through the ring: codes, or numbers in full precision where nothing is coded.
typedef Record<Keys, Values> Page;

// A part of a warp's ring: step n is in stage n % STAGES, the head of page p, which is the
// scales and zeros of its keys, in stage p % STAGES.
struct Stage {
    uint4 pieces[Page::steps + Page::step];
    __device__ uint4* head() { return pieces; }
    __device__ uint4* step() { return pieces + Page::steps; }
};

struct Shared {
    Stage ring[WARPS][STAGES];
};

// Warps of a multiprocessor: also as many as its shared memory has room for, 160 KB.
constexpr int FIT = 160 * 1024 / (STAGES * (int)sizeof(Stage));
constexpr int BLOCKS_RESIDENT = divide_up(RESIDENT < FIT ? RESIDENT : FIT, WARPS);

struct Row {
    const int* table;  // of the pages of its sequence
    int g, H_kv, tokens;
};

// --- the ring --------------------------------------------------------------------------
// `size` pieces of 16 bytes; a lane copies every 32nd of them. Addresses are integers: of
// pointers, the compiler would compute each one anew from the lane.
template <int size>
__device__ inline void copy_async(uint4* to, const uint4* from) {
    int lane = threadIdx.x % 32;
    u32 shared = (u32)__cvta_generic_to_shared(to + lane);
    size_t global = __cvta_generic_to_global(from + lane);
#pragma unroll
    for (int i = 0; i < size; i += 32)
        if (i + 32 <= size || i + lane < size)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared + 16 * i),
                         "l"(global + 16 * i));
}

__device__ inline void close_group() { asm volatile("cp.async.commit_group;"); }

template <int n>
__device__ inline void wait_for_all_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

// Begin to copy step n of a row, begin <= n, if n < end. Each call closes a group.
__device__ inline void fetch(Stage* ring, const uint4* pages, Row row, int n, int begin,
                             int end) {
    constexpr int in_page = Page::in_page;
    if (n < end) {
        const uint4* page =
            pages + ((i64)row.table[n / in_page] * row.H_kv + row.g) * Page::size;
        if constexpr (in_page == 1) {
            copy_async<Page::size>(ring[n % STAGES].head(), page);  // and the step behind it
        } else {
            if (Page::steps > 0 && (n % in_page == 0 || n == begin))
                copy_async<Page::steps>(ring[n / in_page % STAGES].head(), page);
            copy_async<Page::step>(ring[n % STAGES].step(),
                                   page + Page::steps + n % in_page * Page::step);
        }
    }
    close_group();
}

// The tokens from begin STEP to end STEP - 1 of a row, by the ring.
__device__ inline void attend_row(Stage* ring, const uint4* pages, Row row, int begin,
                                  int end, const Query& query, State& state) {
    begin *= STEP / Keys::tokens, end *= STEP / Keys::tokens;
    end = min(end, divide_up(row.tokens, Keys::tokens));
    for (int i = 0; i < STAGES - 1; ++i) fetch(ring, pages, row, begin + i, begin, end);
#pragma unroll 1
    for (int n = begin; n < end; ++n) {
        wait_for_all_but<STAGES - 2>();
        __syncwarp();  // scales are read by all lanes; and all are done with the last step
        fetch(ring, pages, row, n + STAGES - 1, begin, end);
        attend_step<Keys, Values>(ring[n / Page::in_page % STAGES].head(),
                                  ring[n % STAGES].step(), row.tokens - n * Keys::tokens,
                                  query, state);
    }
    wait_for_all_but<0>();
    __syncwarp();
}

// --- parts of a row --------------------------------------------------------------------
// 2^(m - M), the weight of a part: 0 for one that has seen nothing.
__device__ inline float weight_of(float m, float M) {
    return m == NOTHING ? 0.0f : exp2f(m - M);
}

__device__ inline void write_part(const State& s, float* o, float* ml) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < TILES; ++i)
        for (int r = 0; r < 4; ++r) {
            int h = 8 * i + 2 * t + r % 2;
            for (int d = 0; d < BLOCKS; ++d)
                o[h * HEAD_DIM + 16 * d + r / 2 * 8 + g] = s.o[i][d][r];
            if (g > 0 || r > 1) continue;
            ml[2 * h] = s.m[i][r];
            ml[2 * h + 1] = s.l[i][r];
        }
}

// Is this warp the last of `parts` to arrive? What the others wrote is then visible.
__device__ inline bool comes_last(int* arrived, int parts) {
    __threadfence();
    __syncwarp();
    int before = 0;
    if (threadIdx.x % 32 == 0) before = atomicAdd(arrived, 1);
    before = __shfl_sync(WARP, before, 0);
    if (before != parts - 1) return false;
    if (threadIdx.x % 32 == 0) *arrived = 0;
    __threadfence();
    return true;
}

// One head: its parts are HEADS heads apart. __ldcg: not from a cache of this processor.
__device__ inline void merge(const float* part_o, const float* part_ml, int parts,
                             float sink, float* out) {
    float M = sink;
    for (int i = 0; i < parts; ++i) M = fmaxf(M, __ldcg(part_ml + 2 * HEADS * i));
    float l = weight_of(sink, M);
    for (int i = 0; i < parts; ++i)
        l += __ldcg(part_ml + 2 * HEADS * i + 1)
             * weight_of(__ldcg(part_ml + 2 * HEADS * i), M);
    for (int c = threadIdx.x % 32; c < HEAD_DIM; c += 32) {
        float o = 0;
        for (int i = 0; i < parts; ++i)
            o += __ldcg(part_o + HEADS * HEAD_DIM * i + c)
                 * weight_of(__ldcg(part_ml + 2 * HEADS * i), M);
        out[c] = l > 0 ? o / l : 0;
    }
}

// The row that holds step `at` of the list: offsets[row] <= at < offsets[row + 1].
__device__ inline int row_of(const int* offsets, int rows, int at) {
    int low = 0, high = rows - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (offsets[middle] <= at) low = middle;
        else high = middle - 1;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_RESIDENT)
    decode_v5(const X* q, const uint4* pages, const uint4* exact_pages, const int* table,
              const int* lengths, const float* largest, const int* offsets, float* part_o,
              float* part_ml, int* arrived, const float* sink_logits, float* out, int rows,
              int H_q, int H_kv, int P_cap, int E_cap, float scale, float softcap,
              int steps_per_warp, int has_sink) {
    __shared__ Shared shared;
    int warp = blockIdx.x * WARPS + threadIdx.x / 32;
    int at = warp * steps_per_warp, stop = min(at + steps_per_warp, offsets[rows]);
    if (at >= stop) return;
    for (int number = row_of(offsets, rows, at); at < stop; ++number) {
        int start = offsets[number], next = offsets[number + 1];
        int chunk = number % CHUNKS, g = number / CHUNKS % H_kv, b = number / CHUNKS / H_kv;
        int h = g * RATIO + chunk * HEADS, heads = min(HEADS, RATIO - chunk * HEADS);
        const int* numbers = table + (i64)b * (P_cap + E_cap);  // of pages
        Row coded = {numbers, g, H_kv, lengths[2 * b]};
        Row exact = {numbers + P_cap, g, H_kv, lengths[2 * b + 1]};
        int begin = at - start, end = min(stop, next) - start;

        Query query = read_query(q + ((i64)b * H_q + h) * HEAD_DIM, heads,
                                 largest + 2 * ((i64)b * H_kv + g), scale, softcap);
        State state = nothing_seen();
        Stage* ring = shared.ring[threadIdx.x / 32];
        if (Keys::coded) attend_row(ring, pages, coded, begin, end, query, state);
        finish(query);
        finish(state);
        int before = divide_up(coded.tokens, STEP);  // steps of the row with codes
        begin = max(begin - before, 0), end = min(end - before, divide_up(exact.tokens, STEP));
        if (!Keys::coded) attend_row(ring, exact_pages, exact, begin, end, query, state);
#pragma unroll 1
        for (; Keys::coded && begin < end; ++begin)
            attend_page<Exact, Exact>(
                exact_pages
                    + ((i64)exact.table[begin] * H_kv + g) * Record<Exact, Exact>::size,
                exact.tokens - begin * STEP, query, state);

        // Slots of neighbouring parts are neighbours: the next part has the next warp, or
        // the next row.
        i64 slot = (i64)(warp + number) * HEADS;
        write_part(state, part_o + slot * HEAD_DIM, part_ml + 2 * slot);
        int first = start / steps_per_warp, parts = (next - 1) / steps_per_warp - first + 1;
        if (comes_last(arrived + number, parts)) {
            slot = (i64)(first + number) * HEADS;
            for (int i = 0; i < heads; ++i)
                merge(part_o + (slot + i) * HEAD_DIM, part_ml + 2 * (slot + i), parts,
                      has_sink ? 1.4426950408889634f * sink_logits[h + i] : NOTHING,
                      out + ((i64)b * H_q + h + i) * HEAD_DIM);
        }
        at = next;
    }
}
