// Quantization, third version: keys and values go straight into pages.
//
//     code = clip(round((x - z) / s)) + offset,   at its place in a fragment
//
// The idea: the one who writes puts every code where the one who reads wants it. A lane
// makes the 16 bytes that lane of a decoding warp will load: it goes through the fields of
// its fragments, and fetches the number that belongs into each (`pages.py`).
//
// pack_v3: a prompt. Block (b H_kv + g) P + n for page n of a row, P of them, of any number
// of threads; tokens begin .. end - 1 of the T in k and v, zeros behind them.
// pack_v3_window: the PAGE oldest tokens of a window in full precision, behind `sinks`
// tokens that stay. Block b H_kv + g.
// append_v3: tokens begin .. end - 1 into a window, as token `slot` and those that follow.
// A thread for each channel of each token.
//
// Arrays: k, v (B, H_kv, T, D); pages (number, H_kv, record); exact_pages likewise; table
// (B, width), the page numbers of a sequence: those of `pages` from column `coded` on, those
// of `exact_pages` from column `exact` on; largest (B, H_kv, 2), the largest scales so far.
//
// Constants: those of `page.cuh`, and X, the type of k and v.
#include "page.cuh"

typedef Record<Exact, Exact> Window;

// --- where numbers in full precision are -----------------------------------------------
// Of a page, in numbers.
template <bool values>
__device__ inline int exact_place(int token, int channel) {
    int row = values ? channel : token, column = values ? token : channel;
    int lane = row % 8 * 4 + column % 8 / 2, r = column / 8 % 2 * 2 + row / 8 % 2;
    int step = token / EXACT_STEP * Window::step + (values ? Window::values : 0);
    return (step + channel / 16 * 32 + lane) * 8 + 2 * r + column % 2;
}

// Token `slot` of a row, which has its pages in the order of `table`.
template <bool values>
__device__ inline i64 exact_index(const int* table, int H_kv, int g, int slot,
                                  int channel) {
    i64 page = (i64)table[slot / STEP] * H_kv + g;
    return page * Window::size * 8 + exact_place<values>(slot % STEP, channel);
}

extern "C" __global__ void append_v3(const X* k, const X* v, E* exact_pages,
                                     const int* table, int B, int H_kv, int T, int begin,
                                     int end, int slot, int width, int exact) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    int channel = i % HEAD_DIM, t = i / HEAD_DIM % (end - begin);
    i64 head = i / HEAD_DIM / (end - begin);
    if (head >= (i64)B * H_kv) return;
    int g = head % H_kv;
    table += head / H_kv * width + exact;
    i64 from = (head * T + begin + t) * HEAD_DIM + channel;
    round_to(to_float(k[from]),
             exact_pages + exact_index<false>(table, H_kv, g, slot + t, channel));
    round_to(to_float(v[from]),
             exact_pages + exact_index<true>(table, H_kv, g, slot + t, channel));
}

#if KEY_BITS < 16
// --- where the tokens of a page come from ----------------------------------------------
// Rows of `stride` numbers, `count` of them.
struct Rows {
    const X* x;
    int count, stride;
    __device__ float at(int token, int c) const { return to_float(x[token * stride + c]); }
};

// A window, from token `first` on.
template <bool values>
struct Slots {
    const E* pages;
    const int* table;
    int H_kv, g, first, count;
    __device__ float at(int token, int c) const {
        return to_float(pages[exact_index<values>(table, H_kv, g, first + token, c)]);
    }
};

// --- scales ----------------------------------------------------------------------------
// The scales of a page in their own order: a row of columns for each group of tokens.
template <class Side>
struct Numbers {
    static constexpr int tokens = Side::per_channel ? Side::group : 1;  // of a group
    static constexpr int columns = Side::per_channel ? HEAD_DIM : Side::columns;
    static constexpr int count = PAGE / tokens * columns;
    __half scale[count], zero[count];
};

typedef Record<Keys, Values> Page;

// Where element i of vector u is, among numbers that belong to the columns of A.
__device__ inline int vector_place(int u, int i) {
    int t = i % 8 / 2, half = i % 2, right = i / 8;
    return u / 2 * 32 + t * 8 + right * 4 + u % 2 * 2 + half;
}

// Where the number of a group is in its page, in halves.
template <class Side>
__device__ inline int number_place(int row, int column) {
    if (Side::per_channel) return row * HEAD_DIM + vector_place(column / 16, column % 16);
    int step = row / STEP, b = row % STEP / 16;
    if (Side::values)
        return step * Page::step * 8 + vector_place(b * Side::columns + column, row % 16);
    return (column * 8 + row % 8) * 8 + 2 * b + row % 16 / 8;
}

// Scale and zero of every group of a page.
template <class Side, class Source>
__device__ inline void measure(const Source& x, __half* scale, __half* zero, float* largest,
                               Numbers<Side>& numbers) {
    typedef Numbers<Side> N;
    constexpr int width = Side::per_channel ? 1 : Side::group;
    for (int i = threadIdx.x; i < N::count; i += blockDim.x) {
        int row = i / N::columns, column = i % N::columns;
        int begin = row * N::tokens, end = min(begin + N::tokens, x.count);
        float low = infinity(), high = -infinity();
        for (int t = begin; t < end; ++t)
            for (int c = column * width; c < (column + 1) * width; ++c) {
                float value = x.at(t, c);
                low = fminf(low, value);
                high = fmaxf(high, value);
            }
        __half s = 0, z = 0;
        if (begin < end) scale_and_zero(low, high, Side::bits, Side::asymmetric, &s, &z);
        numbers.scale[i] = scale[number_place<Side>(row, column)] = s;
        numbers.zero[i] = z;
        if (Side::asymmetric) zero[number_place<Side>(row, column)] = z;
        // Positive floats are ordered like the integers of the same bits.
        atomicMax(reinterpret_cast<int*>(largest), __float_as_int(to_float(s)));
    }
}

// --- codes -----------------------------------------------------------------------------
template <class Side, class Source>
__device__ inline u32 code(const Source& x, int token, int channel,
                           const Numbers<Side>& numbers) {
    typedef Numbers<Side> N;
    if (token >= x.count) return 0;
    int column = Side::per_channel ? channel : channel / Side::group;
    int i = token / N::tokens * N::columns + column;
    return to_code(x.at(token, channel), to_float(numbers.scale[i]),
                   to_float(numbers.zero[i]), Side::bits, Side::asymmetric);
}

// The lowest bit of register r, half h of fragment j in the 16 bytes of a lane.
template <class Side>
__device__ inline int field(int j, int r, int h) {
    if (Side::bits == 8) return 64 * j + 32 * (r / 2) + 16 * (r % 2) + 8 * h;
    if (Side::bits == 4) return 32 * j + 16 * h + 4 * r;
    int other = Side::values ? r / 2 : r % 2;
    return 32 * (j / 2) + 16 * h + (26 - 2 * place<Side>(j, r) - 8 * other) % 16;
}

// The codes of step `step` of a page, at `to`.
template <class Side, class Source>
__device__ inline void write_codes(const Source& x, int step, uint4* to,
                                   const Numbers<Side>& numbers) {
    for (int i = threadIdx.x; i < Side::step; i += blockDim.x) {
        int lane = i % 32, g = lane / 4, t = lane % 4;
        u32 words[4] = {};
        for (int j = 0; j < Side::fragments; ++j) {
            int f = i / 32 * Side::fragments + j, b = f / BLOCKS, d = f % BLOCKS;
            for (int e = 0; e < 8; ++e) {
                int r = e / 2, h = e % 2;
                int row = g + r % 2 * 8, column = 2 * t + h + r / 2 * 8;
                int token = step * STEP + 16 * b + (Side::values ? column : row);
                int channel = 16 * d + (Side::values ? row : column);
                int at = field<Side>(j, r, h);
                words[at / 32] |= code<Side>(x, token, channel, numbers) << at % 32;
            }
        }
        to[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Keys or values of a page.
template <class Side, class Source>
__device__ inline void write_side(const Source& x, uint4* page, float* largest) {
    constexpr int codes = Page::steps + (Side::values ? Page::values : 0);
    constexpr int scale = Side::values ? Page::steps + Page::value_scale : 0;
    constexpr int zero = Side::values ? Page::steps + Page::value_zero : Page::key_zero;
    __shared__ Numbers<Side> numbers;
    measure<Side>(x, reinterpret_cast<__half*>(page + scale),
                  reinterpret_cast<__half*>(page + zero), largest + Side::values, numbers);
    __syncthreads();
    for (int i = 0; i < Page::in_page; ++i)
        write_codes<Side>(x, i, page + codes + i * Page::step, numbers);
}

// A number is read twice, and not in the order of memory. So the rows of a page come into
// shared memory first, where they fit. A row has 16 bytes more: it starts 4 banks later.
constexpr int WIDE = 16 / sizeof(X), STRIDE = HEAD_DIM + WIDE;
constexpr bool FITS = PAGE * STRIDE * sizeof(X) + sizeof(Numbers<Keys>)
                          + sizeof(Numbers<Values>)
                      <= 48 * 1024;

__device__ inline Rows staged(const Rows& from, X* tile) {
    if (!FITS) return from;
    __syncthreads();  // all are done with what is in the tile
    for (int i = WIDE * threadIdx.x; i < min(from.count, PAGE) * HEAD_DIM;
         i += WIDE * blockDim.x)
        store(tile + i / HEAD_DIM * STRIDE + i % HEAD_DIM, load<WIDE>(from.x + i));
    __syncthreads();
    return {tile, from.count, STRIDE};
}

extern "C" __global__ void pack_v3(const X* k, const X* v, uint4* pages, const int* table,
                                   float* largest, int H_kv, int T, int begin, int end,
                                   int P, int width, int coded) {
    int n = blockIdx.x % P, head = blockIdx.x / P, g = head % H_kv, b = head / H_kv;
    i64 place = table[(i64)b * width + coded + n];
    i64 first = ((i64)head * T + begin + n * PAGE) * HEAD_DIM;
    int count = end - begin - n * PAGE;
    uint4* page = pages + (place * H_kv + g) * Page::size;
    __shared__ alignas(16) X tile[FITS ? PAGE * STRIDE : 1];
    write_side<Keys>(staged({k + first, count, HEAD_DIM}, tile), page, largest + 2 * head);
    write_side<Values>(staged({v + first, count, HEAD_DIM}, tile), page,
                       largest + 2 * head);
}

// The sinks go where the newest of the tokens that leave have been: then the pages in front
// of that one are free.
extern "C" __global__ void pack_v3_window(E* exact_pages, uint4* pages, const int* table,
                                          float* largest, int H_kv, int sinks, int width,
                                          int coded, int exact) {
    int head = blockIdx.x, g = head % H_kv, b = head / H_kv;
    i64 place = table[(i64)b * width + coded];
    const int* window = table + (i64)b * width + exact;
    uint4* page = pages + (place * H_kv + g) * Page::size;
    write_side<Keys>(Slots<false>{exact_pages, window, H_kv, g, sinks, PAGE}, page,
                     largest + 2 * head);
    write_side<Values>(Slots<true>{exact_pages, window, H_kv, g, sinks, PAGE}, page,
                       largest + 2 * head);
    __syncthreads();
    for (int i = threadIdx.x; i < sinks * HEAD_DIM; i += blockDim.x) {
        int slot = i / HEAD_DIM, c = i % HEAD_DIM;
        exact_pages[exact_index<false>(window, H_kv, g, slot + PAGE, c)] =
            exact_pages[exact_index<false>(window, H_kv, g, slot, c)];
        exact_pages[exact_index<true>(window, H_kv, g, slot + PAGE, c)] =
            exact_pages[exact_index<true>(window, H_kv, g, slot, c)];
    }
}
#endif
