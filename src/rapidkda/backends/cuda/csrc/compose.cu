// Start states of the parts of a segment from their affine transitions: S_{p+1} = S_p M_p + B_p, in fp32. The first
// part's B starts from the segment's own state, and a part that follows a seam of oblivion (seams.cu) depends on no
// start: then S_{p+1} = B_p. A block owns 8 rows (V) of one head of one segment and walks the parts; a thread owns a
// column (K) and a quarter of the sum. Grid: (16, value heads, segments).
#include "work.cuh"

constexpr int kRows = 8, kQuarters = 4, kThreads = 128 * kQuarters, kMatrix = 128 * 128;

struct LaunchInfo {
    int threads, shared_bytes, cluster;
};
extern "C" __constant__ const LaunchInfo launch_info = {kThreads, 0, 1};

extern "C" __global__ void __launch_bounds__(kThreads) compose(const __grid_constant__ Params p) {
    __shared__ float rows[kRows][128];
    __shared__ float partial[kQuarters][kRows][128];
    __shared__ Work w;
    const int column = threadIdx.x & 127, quarter = threadIdx.x >> 7, row0 = blockIdx.x * kRows, head = blockIdx.y;
    if (threadIdx.x == 0) w = find_work(p, blockIdx.z * p.parts * p.value_heads + head, p.parts);
    __syncthreads();
    if (w.padding) return;
    bool depends = false;  // the part depends on its start, which `rows` holds
    for (int part = 0; part < p.parts - 1; part++) {
        const i64 next = part_index(p, w, part + 1);
        const bool needed = p.seams[next] < 0;
        const float* transition = p.transitions + 2 * part_index(p, w, part) * kMatrix;
        float m[32], b[kRows / kQuarters];
        if (needed) {
#pragma unroll
            for (int r = 0; r < kRows / kQuarters; r++)
                b[r] = transition[(row0 + quarter + kQuarters * r) * 128 + column];
        }
        if (needed && depends) {
#pragma unroll
            for (int k = 0; k < 32; k++) m[k] = transition[kMatrix + (quarter * 32 + k) * 128 + column];
            __syncthreads();
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                float x = 0.f;
#pragma unroll
                for (int k = 0; k < 32; k++) x = fmaf(rows[r][quarter * 32 + k], m[k], x);
                partial[quarter][r][column] = x;
            }
            __syncthreads();
#pragma unroll
            for (int r = 0; r < kRows / kQuarters; r++) {
                const int row = quarter + kQuarters * r;
                b[r] += partial[0][row][column] + partial[1][row][column] + partial[2][row][column] +
                        partial[3][row][column];
            }
        }
        depends = needed;
        if (!needed) continue;
#pragma unroll
        for (int r = 0; r < kRows / kQuarters; r++) {
            const int row = quarter + kQuarters * r;
            rows[row][column] = b[r];
            p.starts[next * kMatrix + (row0 + row) * 128 + column] = b[r];
        }
    }
}
