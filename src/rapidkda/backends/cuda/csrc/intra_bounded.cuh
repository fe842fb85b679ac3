// Products within a chunk for the bounded gate. Its log2 decay over 16 tokens stays within 16 * 5 * log2(e) = 115.4, so
// one anchor serves the chunk: L_ij = <k_i 2^(G_i + s), k_j 2^(-G_j - s)>. The constant s centres the exponents, so that
// keys of any magnitude stay clear of both ends of the bf16 range. Row i depends on tokens up to i only.
#pragma once
#include "solve.cuh"

constexpr float kShift = 56.f;         // s; a power of two, so that undoing it is exact
constexpr float kUnshift = 0x1p-56f;

// Warp 0 of the group: L, scaled, into the scratch, and the solve. Warp 1: Aqk into the stage.
// raw: raw q, k and (over g) the inverse-decayed keys, their halves kInverseHalf apart; rows: valid tokens; beta: of token
// `lane` (warp 0, lane < 16).
template <int kInverseHalf>
DEVICE void intra_bounded(u32 raw, u32 stage, u32 scratch, int warp, int lane, int rows, float beta, bool l2norm,
                          float scale) {
    float norms[8] = {0, 0, 0, 0, 0, 0, 0, 0}, products[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    const u32 x_raw = raw + (warp == 0 ? 4096 : 0), decayed = stage + Stage::kd_qd + (warp == 0 ? 0 : 2048);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 x[4][4], a[4][4], b[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++) {
            load_matrix(x[s], a_operand(x_raw + half * 2048, lane, s));
            load_matrix(a[s], a_operand(decayed + half * 4096, lane, s));
            load_matrix(b[s], b_operand(raw + 8192 + half * kInverseHalf, lane, s));
        }
#pragma unroll
        for (int s = 0; s < 4; s++) {
            square_step(norms, x[s]);
            mma(products, a[s], b[s][0], b[s][1]);
            mma(products + 4, a[s], b[s][2], b[s][3]);
        }
    }
    const int g = lane >> 2, q = lane & 3;
    if (on_diagonal(lane)) {
        const float low = l2norm ? inverse_sqrt(diagonal_low(norms, lane) + 1e-6f) : 1.f;
        const float high = l2norm ? inverse_sqrt(diagonal_high(norms, lane) + 1e-6f) : 1.f;
        const float x = g < rows ? low * scale : 0.f, y = g + 8 < rows ? high * scale : 0.f;
        const u32 to = stage + Stage::row_scale + warp * 64 + g * 4;
        store_shared_float(to, x * kUnshift);
        store_shared_float(to + 32, y * kUnshift);
        if (warp == 0) {
            store_shared_float(scratch + Scratch::key_scale + g * 4, x);
            store_shared_float(scratch + Scratch::key_scale + g * 4 + 32, y);
        }
    }
    if (warp == 1) {  // Aqk, lower triangle and diagonal, shifted like qd: the row scale undoes it
        const u32 to = stage + Stage::intra + g * 16 + q * 4;
        const int c = 2 * q;
        constexpr float k = 0x1p56f;
        store_shared(to, pack_bf16(g >= c ? k * products[0] : 0.f, g >= c + 1 ? k * products[1] : 0.f));
        store_shared(to + 128, pack_bf16(k * products[2], k * products[3]));
        store_shared(to + 256, 0u);
        store_shared(to + 384, pack_bf16(g >= c ? k * products[6] : 0.f, g >= c + 1 ? k * products[7] : 0.f));
        return;
    }
    __syncwarp();
    const u32 scales = scratch + Scratch::key_scale;
    const Pair column = load_shared_pair(scales + q * 8), column8 = load_shared_pair(scales + 32 + q * 8);
    const float row = load_shared_float(scales + g * 4) * __shfl_sync(kAllLanes, beta, g);
    const float row8 = load_shared_float(scales + 32 + g * 4) * __shfl_sync(kAllLanes, beta, g + 8);
    const u32 to = lower_entry(scratch, g, 2 * q);
    constexpr int next = Scratch::lower_row;
    store_shared_float(to, products[0] * row * column.x);
    store_shared_float(to + next, products[1] * row * column.y);
    store_shared_float(to + 32, products[2] * row8 * column.x);
    store_shared_float(to + next + 32, products[3] * row8 * column.y);
    store_shared_float(to + 8 * next + 32, products[6] * row8 * column8.x);
    store_shared_float(to + 9 * next + 32, products[7] * row8 * column8.y);
    __syncwarp();
    solve_and_store(stage, scratch, lane, beta);
}
