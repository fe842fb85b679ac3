// Addresses within swizzled tiles, and products of such tiles by one warp.
//
// A tile is [64-channel half][rows][128 bytes]; the 128-byte swizzle exchanges its 16-byte pieces: piece p of row r
// lies at p ^ (r % 8). Each half starts at a multiple of 1024 bytes.
#pragma once
#include "mma.cuh"
#include "shared.cuh"

// ldmatrix addresses of this lane. A operand: 16 rows x 16 channels. B operand: 16 rows (n) x 16 channels (k).
DEVICE u32 a_operand(u32 half, int lane, int step) {
    const u32 row = ((lane >> 3) & 1) * 8 + (lane & 7), piece = 2 * step + (lane >> 4);
    return half + row * 128 + ((piece ^ (row & 7)) << 4);
}
DEVICE u32 b_operand(u32 half, int lane, int step) {
    const u32 row = (lane >> 4) * 8 + (lane & 7), piece = 2 * step + ((lane >> 3) & 1);
    return half + row * 128 + ((piece ^ (row & 7)) << 4);
}
// As a_operand, with rows 8..15 of the operand `second` bytes behind rows 0..7.
DEVICE u32 a_operand_split(u32 half, int lane, int step, u32 second) {
    const u32 row = lane & 7, piece = 2 * step + (lane >> 4);
    return half + ((lane >> 3) & 1) * second + row * 128 + ((piece ^ row) << 4);
}

// x where row >= column (inclusive) or row > column.
DEVICE float lower(float x, int row, int column) { return row >= column ? x : 0.f; }
