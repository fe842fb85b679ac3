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
    float low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};  // rows and columns 0..7, and 8..15
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 x[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++) load_matrix(x[s], a_operand(tile + half * 2048, lane, s));
#pragma unroll
        for (int s = 0; s < 4; s++) {
            mma(low, x[s], x[s][0], x[s][2]);
            mma(high, x[s], x[s][1], x[s][3]);
        }
    }
    const int g = lane >> 2;  // the diagonal: row g and row g + 8, in the lane whose columns hold it
    if ((lane & 3) != (g >> 1)) return;
    const float first = inverse_sqrt((g & 1 ? low[1] : low[0]) + 1e-6f);
    const float second = inverse_sqrt((g & 1 ? high[3] : high[2]) + 1e-6f);
    store_shared_float(to + g * 4, g < rows ? first * factor : 0.f);
    store_shared_float(to + g * 4 + 32, g + 8 < rows ? second * factor : 0.f);
}
