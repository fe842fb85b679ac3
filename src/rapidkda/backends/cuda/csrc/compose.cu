// Start states of the parts of a segment from their affine transitions: S_{p+1} = S_p M_p + B_p, in fp32. The first
// part's B starts from the segment's own state, and a part behind a seam across which nothing is remembered (seams.cu)
// depends on no start: then S_{p+1} = B_p. A block owns 8 rows (V) of one head of one segment and walks the parts; a
// thread owns a column (K) and a quarter of the sum. Grid: (16, value heads, segments).
//
// What a padding row's segment finds here is garbage, and its start states are read by nobody.
#include "params.cuh"

constexpr int kRows = 8, kQuarters = 4, kThreads = 128 * kQuarters, kMatrix = 128 * 128;

struct LaunchInfo {
    int threads, shared_bytes, cluster;
};
extern "C" __constant__ const LaunchInfo launch_info = {kThreads, 0, 1};

extern "C" __global__ void __launch_bounds__(kThreads) compose(const __grid_constant__ Params p) {
    __shared__ alignas(16) float rows[kRows][128];  // the start of the part, where it depends on one
    __shared__ float partial[kQuarters][kRows][128];
    const int column = threadIdx.x & 127, quarter = threadIdx.x >> 7, row0 = blockIdx.x * kRows;
    auto index = [&](int part) { return (static_cast<i64>(blockIdx.z) * p.parts + part) * p.value_heads + blockIdx.y; };
    const int lane = threadIdx.x & 31;
    const int seam = lane > 0 && lane < p.parts ? p.seams[index(lane)] : 0;
    const u32 cut = __ballot_sync(kAllLanes, seam >= 0);  // bit i: part i depends on no start
    auto needed = [&](int part) { return part < p.parts - 1 && !(cut >> (part + 1) & 1u); };
    auto multiplied = [&](int part) { return needed(part) && !(cut >> part & 1u); };

    float m[32], b[kRows / kQuarters];
    auto load = [&](int part) {  // a part ahead
        const float* transition = p.transitions + 2 * index(part) * kMatrix;
        if (needed(part)) {
#pragma unroll
            for (int r = 0; r < kRows / kQuarters; r++)
                b[r] = transition[(row0 + quarter + kQuarters * r) * 128 + column];
        }
        if (multiplied(part)) {
#pragma unroll
            for (int k = 0; k < 32; k++) m[k] = transition[kMatrix + (quarter * 32 + k) * 128 + column];
        }
    };
    load(0);
    for (int part = 0; part < p.parts - 1; part++) {
        float start[kRows / kQuarters];
#pragma unroll
        for (int r = 0; r < kRows / kQuarters; r++) start[r] = b[r];
        if (multiplied(part)) {
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                float x = 0.f;
#pragma unroll
                for (int k = 0; k < 32; k += 4) {
                    const Quad s = *reinterpret_cast<const Quad*>(&rows[r][quarter * 32 + k]);
                    x = fmaf(s.x, m[k], fmaf(s.y, m[k + 1], fmaf(s.z, m[k + 2], fmaf(s.w, m[k + 3], x))));
                }
                partial[quarter][r][column] = x;
            }
        }
        load(part + 1);
        __syncthreads();
        if (!needed(part)) continue;
#pragma unroll
        for (int r = 0; r < kRows / kQuarters; r++) {
            const int row = quarter + kQuarters * r;
            if (multiplied(part))
                start[r] += partial[0][row][column] + partial[1][row][column] + partial[2][row][column] +
                            partial[3][row][column];
            rows[row][column] = start[r];
            p.starts[index(part + 1) * kMatrix + (row0 + row) * 128 + column] = start[r];
        }
        __syncthreads();
    }
}
