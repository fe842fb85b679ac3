// Start states of the parts of a segment from their affine transitions: S_{p+1} = S_p M_p + B_p, in fp32. A block owns
// 8 rows (V) of one head of one segment and walks the parts; a thread owns a column (K) and a quarter of the sum.
// Grid: (16, value heads, segments).
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
    const bool v_first = p.flags & kStateVFirst;
    for (int r = quarter; r < kRows; r += kQuarters) {
        const i64 at = w.read_slot * p.initial_stride + static_cast<i64>(head) * kMatrix +
                       (v_first ? (row0 + r) * 128 + column : column * 128 + row0 + r);
        rows[r][column] = w.has_initial ? load_element(p.initial, at, p.flags & kInitialFloat) : 0.f;
    }
    for (int part = 0; part < p.parts; part++) {
        const i64 matrix = ((static_cast<i64>(w.segment) * p.parts + part) * p.value_heads + head) * kMatrix;
        const float* transition = p.transitions + 2 * matrix;
        const bool last = part == p.parts - 1;
        float m[32], b[kRows / kQuarters];
        if (!last) {
#pragma unroll
            for (int k = 0; k < 32; k++) m[k] = transition[kMatrix + (quarter * 32 + k) * 128 + column];
#pragma unroll
            for (int r = 0; r < kRows / kQuarters; r++)
                b[r] = transition[(row0 + quarter + kQuarters * r) * 128 + column];
        }
        __syncthreads();
        for (int r = quarter; r < kRows; r += kQuarters) p.starts[matrix + (row0 + r) * 128 + column] = rows[r][column];
        if (last) break;
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
            rows[row][column] = b[r] + partial[0][row][column] + partial[1][row][column] + partial[2][row][column] +
                                partial[3][row][column];
        }
    }
}
