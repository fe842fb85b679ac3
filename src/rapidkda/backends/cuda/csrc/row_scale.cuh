// Scales of raw rows: 1 / |x_i| under the L2 norm, else 1; times a factor; 0 past the segment's end. Operands
// stay raw, and the scales are applied to rows and columns of the small products instead.
#pragma once
#include "tiles.cuh"

// Scales lie in the order in which the lanes of a product need them: of tokens 2q, 2q + 1, 8 + 2q, 9 + 2q for q = 0..3.
// Byte offset of the scale of a token below 8; that of token + 8 lies 8 bytes on.
DEVICE int scale_of(int token) { return (token >> 1) * 16 + (token & 1) * 4; }

// One warp, 16 rows of a raw tile: the squared norms are the diagonal of x x^T. Writes fp32 [16] at `to`.
DEVICE void write_row_scales(u32 to, u32 tile, int lane, int rows, bool l2norm, float factor) {
    if (!l2norm) {
        if (lane < 16) store_shared_float(to + scale_of(lane & 7) + (lane & 8), lane < rows ? factor : 0.f);
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
        for (int s = 0; s < 4; s++) {
            mma_k8(low, x[s][0], x[s][1], x[s][0]);  // a product of 16 channels would want its operands moved
            mma_k8(high, x[s][0], x[s][1], x[s][1]);
            mma_k8(low, x[s][2], x[s][3], x[s][2]);
            mma_k8(high, x[s][2], x[s][3], x[s][3]);
        }
    }
    const int g = lane >> 2;  // the diagonal: row g and row g + 8, in the lane whose columns hold it
    if ((lane & 3) != (g >> 1)) return;
    const float scale = inverse_sqrt((g & 1 ? low[1] : low[0]) + 1e-6f);
    const float scale8 = inverse_sqrt((g & 1 ? high[3] : high[2]) + 1e-6f);
    store_shared_float(to + scale_of(g), g < rows ? scale * factor : 0.f);
    store_shared_float(to + scale_of(g) + 8, g + 8 < rows ? scale8 * factor : 0.f);
}
