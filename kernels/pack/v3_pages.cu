// Quantization, third version: keys and values of a prompt go straight into pages.
//
//     code = clip(round((x - z) / s)) + offset,   at its place in a fragment
//
// The idea: the one who writes puts every code where the one who reads wants it. A lane
// makes the 16 bytes that lane of a decoding warp will load: it goes through the fields of
// its fragments, and fetches the number that belongs into each (`pages.py`). Numbers in
// full precision (KEY_BITS = VALUE_BITS = 16) become pages in the same way.
//
// pack_v3: block (b H_kv + g) P + n for page n of a row, of any number of threads. Arrays:
// k, v (B, H_kv, T, D); pages (number, H_kv, record); table (B, P), the page numbers;
// largest (B, H_kv, 2), the largest scales, zeros at the start. Slots behind token T become
// zeros.
//
// Constants: those of `page.cuh`, and X, the type of k and v.
#include "page.cuh"

typedef Record<Keys, Values> Page;

// The scales of a page in their own order: a row of columns for each group of tokens.
template <class Side>
struct Numbers {
    static constexpr int tokens = Side::per_channel ? Side::group : 1;  // of a group
    static constexpr int columns = Side::per_channel ? HEAD_DIM : Side::columns;
    static constexpr int count = Side::coded ? PAGE / tokens * columns : 0;
    __half scale[count + 1], zero[count + 1];
};

struct Shared {
    Numbers<Keys> keys;
    Numbers<Values> values;
};

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

// Scale and zero of every group of a page whose first token is `first`.
template <class Side>
__device__ inline void measure(const X* x, int first, int T, __half* scale, __half* zero,
                               float* largest, Numbers<Side>& numbers) {
    typedef Numbers<Side> N;
    constexpr int width = Side::per_channel ? 1 : Side::group;
    for (int i = threadIdx.x; i < N::count; i += blockDim.x) {
        int row = i / N::columns, column = i % N::columns;
        int begin = first + row * N::tokens, end = min(begin + N::tokens, T);
        float low = infinity(), high = -infinity();
        for (int t = begin; t < end; ++t)
            for (int c = column * width; c < (column + 1) * width; ++c) {
                float value = to_float(x[(i64)t * HEAD_DIM + c]);
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

template <class Side>
__device__ inline u32 code(const X* x, int first, int T, int token, int channel,
                           const Numbers<Side>& numbers) {
    typedef Numbers<Side> N;
    if (first + token >= T) return 0;
    X value = x[(i64)(first + token) * HEAD_DIM + channel];
    if (!Side::coded) return __half_as_ushort(to_stored<__half>(to_float(value)));
    int column = Side::per_channel ? channel : channel / Side::group;
    int i = token / N::tokens * N::columns + column;
    return to_code(to_float(value), to_float(numbers.scale[i]), to_float(numbers.zero[i]),
                   Side::bits, Side::asymmetric);
}

// The lowest bit of register r, half h of fragment j in the 16 bytes of a lane.
template <class Side>
__device__ inline int field(int j, int r, int h) {
    if (Side::bits == 16) return 32 * r + 16 * h;
    if (Side::bits == 8) return 64 * j + 32 * (r / 2) + 16 * (r % 2) + 8 * h;
    if (Side::bits == 4) return 32 * j + 16 * h + 4 * r;
    int other = Side::values ? r / 2 : r % 2;
    return 32 * (j / 2) + 16 * h + (26 - 2 * place<Side>(j, r) - 8 * other) % 16;
}

// The codes of step `step` of a page, at `to`.
template <class Side>
__device__ inline void write_codes(const X* x, int first, int T, int step, uint4* to,
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
                words[at / 32] |= code<Side>(x, first, T, token, channel, numbers)
                                  << at % 32;
            }
        }
        to[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

extern "C" __global__ void pack_v3(const X* k, const X* v, uint4* pages, const int* table,
                                   float* largest, int H_kv, int T, int P) {
    __shared__ Shared shared;
    int n = blockIdx.x % P, head = blockIdx.x / P, g = head % H_kv, b = head / H_kv;
    uint4* page = pages + ((i64)table[(i64)b * P + n] * H_kv + g) * Page::size;
    uint4* steps = page + Page::steps;
    int first = n * PAGE;
    k += (i64)head * T * HEAD_DIM;
    v += (i64)head * T * HEAD_DIM;
    measure<Keys>(k, first, T, reinterpret_cast<__half*>(page),
                  reinterpret_cast<__half*>(page + Page::key_zero), largest + 2 * head,
                  shared.keys);
    measure<Values>(v, first, T, reinterpret_cast<__half*>(steps + Page::value_scale),
                    reinterpret_cast<__half*>(steps + Page::value_zero),
                    largest + 2 * head + 1, shared.values);
    __syncthreads();
    for (int i = 0; i < PAGE / STEP; ++i) {
        uint4* step = steps + i * Page::step;
        write_codes<Keys>(k, first, T, i, step, shared.keys);
        write_codes<Values>(v, first, T, i, step + Page::values, shared.values);
    }
}
