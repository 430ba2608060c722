// Tiles of 128 numbers come to shared memory by cp.async, one tile ahead, and leave it
// reversed. No kernel of the ladder copies this way; its usual mistakes are tested here.
//
// One block of 32 threads. Arrays: x and y (tiles, 128).
__device__ inline void fetch(float* shared, const float* global) {
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global));
}

extern "C" __global__ void reverse_tiles(const float* x, float* y, int tiles) {
    __shared__ __align__(16) float tile[2][128];
    int lane = threadIdx.x;
    fetch(&tile[0][4 * lane], x + 4 * lane);
    asm volatile("cp.async.commit_group;");
    for (int i = 0; i < tiles; ++i) {
        if (i + 1 < tiles) fetch(&tile[(i + 1) % 2][4 * lane], x + 128 * (i + 1) + 4 * lane);
        asm volatile("cp.async.commit_group;");  // an empty group after the last tile
        asm volatile("cp.async.wait_group 1;");  // all but the newest have arrived
        __syncthreads();
        for (int c = lane; c < 128; c += 32) y[128 * i + c] = tile[i % 2][127 - c];
        __syncthreads();
    }
}
