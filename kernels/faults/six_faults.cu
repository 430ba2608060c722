// One small kernel, right and with six faults, for the lesson on races and bounds and for
// the tests of the machine that finds them. Nothing else uses it.
//
//     y_i = x_(n-1-i) within each block of 64 numbers; the last block may be smaller
//
// The idea: a block reads its numbers side by side into shared memory, and writes them
// side by side from there, in the other order. Launched with 64 threads per block.
//
// Constants: none.

constexpr int BLOCK = 64;

extern "C" __global__ void reverse(const float* x, float* y, int n) {
    __shared__ float tile[BLOCK];
    int first = blockIdx.x * BLOCK, i = threadIdx.x, count = min(BLOCK, n - first);
    if (i < count) tile[i] = x[first + i];
    __syncthreads();
    if (i < count) y[first + i] = tile[count - 1 - i];
}

extern "C" __global__ void reverse_without_guard(const float* x, float* y, int n) {
    __shared__ float tile[BLOCK];
    int first = blockIdx.x * BLOCK, i = threadIdx.x, count = min(BLOCK, n - first);
    tile[i] = x[first + i];  // threads from count on have no number
    __syncthreads();
    if (i < count) y[first + i] = tile[count - 1 - i];
}

extern "C" __global__ void reverse_without_barrier(const float* x, float* y, int n) {
    __shared__ float tile[BLOCK];
    int first = blockIdx.x * BLOCK, i = threadIdx.x, count = min(BLOCK, n - first);
    if (i < count) tile[i] = x[first + i];
    if (i < count) y[first + i] = tile[count - 1 - i];  // perhaps not written yet
}

extern "C" __global__ void reverse_barrier_inside(const float* x, float* y, int n) {
    __shared__ float tile[BLOCK];
    int first = blockIdx.x * BLOCK, i = threadIdx.x, count = min(BLOCK, n - first);
    if (i < count) {
        tile[i] = x[first + i];
        __syncthreads();  // the other threads never come here
        y[first + i] = tile[count - 1 - i];
    }
}

// Within a warp, 32 numbers at a time.
extern "C" __global__ void reverse_by_shuffle(const float* x, float* y, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x, lane = threadIdx.x % 32;
    if (i >= n) return;  // but the shuffle names all 32 lanes
    y[i] = __shfl_sync(0xffffffffu, x[i], 31 - lane);
}

// From x[1] on, four numbers at a time.
extern "C" __global__ void reverse_by_vectors(const float* x, float* y, int n) {
    int i = 4 * (blockIdx.x * BLOCK + threadIdx.x);
    if (i + 4 >= n) return;
    // 16 bytes must begin at a multiple of 16, and x + 1 does not.
    float4 v = *reinterpret_cast<const float4*>(x + 1 + i);
    y[i] = v.w, y[i + 1] = v.z, y[i + 2] = v.y, y[i + 3] = v.x;
}

extern "C" __global__ void reverse_too_far(const float* x, float* y, int n) {
    __shared__ float tile[BLOCK];
    int first = blockIdx.x * BLOCK, i = threadIdx.x, count = min(BLOCK, n - first);
    if (i < count) tile[i] = x[first + i];
    __syncthreads();
    if (i < count) y[first + i] = tile[count - i];  // one past the end for i = 0
}
