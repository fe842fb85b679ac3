// (I + L)^-1 of a 16 x 16 unit lower triangular matrix by forward substitution in fp32, one column a lane. Products of
// powers of L in half precision lose everything for near-collinear keys; substitution does not.
#pragma once
#include "layout.cuh"
#include "tiles.cuh"

// Scratch of a producer group.
struct Scratch {
    static constexpr int lower = 0;  // L^T fp32, [j][i], rows padded to 20 floats; only i > j is read
    static constexpr int lower_row = 80;
    static constexpr int scales = 1280;  // two sets, for chunks in turn: fp32 [16] of k, then of q (row_scale.cuh)
    static constexpr int scales_bytes = 128;
};

DEVICE u32 lower_entry(u32 scratch, int i, int j) { return scratch + Scratch::lower + j * Scratch::lower_row + i * 4; }

// The scales that turn raw products <k_i, k_j> into L: rows g and g + 8 (times beta), columns 2q, 2q + 1 and 8 + those.
struct LowerScales {
    float row, row8;
    Pair column, column8;
};
DEVICE LowerScales lower_scales(u32 scales, int lane, float beta) {
    const int g = lane >> 2, q = lane & 3;
    return LowerScales{load_shared_float(scales + g * 4) * __shfl_sync(kAllLanes, beta, g),
                       load_shared_float(scales + 32 + g * 4) * __shfl_sync(kAllLanes, beta, g + 8),
                       load_shared_pair(scales + q * 8), load_shared_pair(scales + 32 + q * 8)};
}

// Scales of the keys, 1 / |k_i|, from the diagonal of the products within the chunk: rows g and g + 8.
DEVICE void norm_scales(u32 scales, u32 row_scale, float first, float second, int lane, int rows, float down) {
    const int g = lane >> 2;
    if ((lane & 3) == (g >> 1)) {
        const float a = g < rows ? inverse_sqrt(first + 1e-6f) : 0.f;
        const float b = g + 8 < rows ? inverse_sqrt(second + 1e-6f) : 0.f;
        store_shared_float(scales + g * 4, a);
        store_shared_float(scales + 32 + g * 4, b);
        store_shared_float(row_scale + g * 4, a * down);
        store_shared_float(row_scale + 32 + g * 4, b * down);
    }
    __syncwarp();
}

// Lanes j and 16 + j compute column j of Diag(key scale) (I + L)^-1 Diag(beta) and write the upper and the lower half
// of its rows, as a high and a low bf16 part: the consumers multiply raw keys, so the rows carry their scale.
// scales: of the keys; beta: of token `lane`.
DEVICE void solve_and_store(u32 stage, u32 scratch, u32 scales, int lane, float beta) {
    const int column = lane & 15, first_row = (lane >> 4) * 8;
    float x[16];
#pragma unroll
    for (int m = 0; m < 16; m++) x[m] = m == column ? 1.f : 0.f;
#pragma unroll
    for (int m = 0; m < 15; m++) {
#pragma unroll
        for (int c = (m + 1) / 4; c < 4; c++) {
            const Quad l = load_shared_quad(scratch + Scratch::lower + m * Scratch::lower_row + c * 16);
            if (4 * c > m) x[4 * c] = fmaf(-l.x, x[m], x[4 * c]);
            if (4 * c + 1 > m) x[4 * c + 1] = fmaf(-l.y, x[m], x[4 * c + 1]);
            if (4 * c + 2 > m) x[4 * c + 2] = fmaf(-l.z, x[m], x[4 * c + 2]);
            if (4 * c + 3 > m) x[4 * c + 3] = fmaf(-l.w, x[m], x[4 * c + 3]);
        }
    }
    const float strength = __shfl_sync(kAllLanes, beta, column);
    const u32 to = stage + Stage::inverse + small_matrix(first_row, column);
    const u32 low = to + Stage::inverse_low - Stage::inverse;
#pragma unroll
    for (int m = 0; m < 8; m += 2) {
        const Pair scale = load_shared_pair(scales + (first_row + m) * 4);
        const float y0 = (first_row ? x[m + 8] : x[m]) * strength * scale.x;
        const float y1 = (first_row ? x[m + 9] : x[m + 1]) * strength * scale.y;
        const u32 high = pack_bf16(y0, y1);
        store_shared_halves(to + m * 16, to + m * 16 + 16, high);
        store_shared_halves(low + m * 16, low + m * 16 + 16, pack_bf16(y0 - low_bf16(high), y1 - high_bf16(high)));
    }
}
