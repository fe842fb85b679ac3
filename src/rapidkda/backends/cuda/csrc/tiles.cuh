// Addresses within swizzled tiles, and products of such tiles by one warp.
//
// A tile is [64-channel half][rows][128 bytes]; the 128-byte swizzle exchanges its 16-byte pieces: piece p of row r lies
// at p ^ (r % 8). Each half starts at a multiple of 1024 bytes.
#pragma once
#include "mma.cuh"
#include "shared.cuh"

// ldmatrix addresses of this lane. A operand: 16 rows x 16 channels. B operand: 16 rows (n) x 16 channels (k), or, for 8
// rows, 8 x 32 channels.
DEVICE u32 a_operand(u32 half, int lane, int step) {
    const u32 row = ((lane >> 3) & 1) * 8 + (lane & 7), piece = 2 * step + (lane >> 4);
    return half + row * 128 + ((piece ^ (row & 7)) << 4);
}
DEVICE u32 b_operand(u32 half, int lane, int step) {
    const u32 row = (lane >> 4) * 8 + (lane & 7), piece = 2 * step + ((lane >> 3) & 1);
    return half + row * 128 + ((piece ^ (row & 7)) << 4);
}
DEVICE u32 b_operand_8rows(u32 half, int lane, int two_steps) {
    const u32 row = lane & 7, piece = 4 * two_steps + (lane >> 3);
    return half + row * 128 + ((piece ^ row) << 4);
}

// Diagonal of x x^T: every lane with lane % 4 == lane / 8 holds rows lane / 4 and lane / 4 + 8 (see diagonal_low/high).
DEVICE void square_step(float* norms, const u32* x) {
    mma(norms, x, x[0], x[2]);
    mma(norms + 4, x, x[1], x[3]);
}
DEVICE bool on_diagonal(int lane) { return (lane & 3) == (lane >> 3); }
DEVICE float diagonal_low(const float* products, int lane) { return (lane >> 2) & 1 ? products[1] : products[0]; }
DEVICE float diagonal_high(const float* products, int lane) { return (lane >> 2) & 1 ? products[7] : products[6]; }

// Byte offset of element (row, column) in a 16 x 16 bf16 matrix [2 column halves][16][8].
DEVICE u32 small_matrix(int row, int column) { return (column >> 3) * 256 + row * 16 + (column & 7) * 2; }
