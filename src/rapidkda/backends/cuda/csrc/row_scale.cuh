// Scales of raw rows: 1 / |x_i| under the L2 norm, else 1; times a factor; 0 past the segment's end. Operands
// stay raw, and the scales are applied to rows and columns of the small products instead.
#pragma once
#include "tiles.cuh"

// One warp, 16 rows of a raw tile: the squared norms are the diagonal of x x^T. Writes fp32 [16] at `to`.
DEVICE void write_row_scales(u32 to, u32 tile, int lane, int rows, bool l2norm, float factor) {
    if (!l2norm) {
        if (lane < 16) store_shared_float(to + lane * 4, lane < rows ? factor : 0.f);
        return;
    }
    const u32 first = a_operand(tile, lane, 0);
    float low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};  // rows and columns 0..7, and 8..15
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 x[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++) load_matrix(x[s], (first ^ (32 * s)) + half * 2048);
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int k = 0; k < 4; k += 2) {  // 8 channels at a time: the columns of 16 are not neighbours
                mma_k8(low, x[s] + k, x[s][k]);
                mma_k8(high, x[s] + k, x[s][k + 1]);
            }
    }
    const int g = lane >> 2;  // the diagonal: row g and row g + 8, in the lane whose columns hold it
    if ((lane & 3) != (g >> 1)) return;
    const float scale = inverse_sqrt((g & 1 ? low[1] : low[0]) + 1e-6f);
    const float scale8 = inverse_sqrt((g & 1 ? high[3] : high[2]) + 1e-6f);
    store_shared_float(to + g * 4, g < rows ? scale * factor : 0.f);
    store_shared_float(to + g * 4 + 32, g + 8 < rows ? scale8 * factor : 0.f);
}
