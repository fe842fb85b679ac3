// Products within a chunk for any log decay. The lower triangle is cut in halves again and again: at level l, blocks of
// 2^(l+1) tokens, rows are the later half and columns the earlier half of each block, and both are anchored at the last
// token of the earlier half: k_i 2^(G_i - A) and k_j 2^(A - G_j). Every factor is at most 1, nothing overflows, what
// underflows is zero in the product too, and row i depends on tokens up to i only. Four levels and the diagonal cover
// the triangle.
//
// At each level a token is either a row or a column, so one 16-row tile carries the decayed keys of the row tokens at
// their own places and the decayed queries of the row tokens at the places of their column partners (2^l earlier): eight
// m16n8k16 products give the level's part of L and of Aqk. Each warp multiplies its own 64 channels; the sums meet in
// shared memory.
#pragma once
#include "solve.cuh"

constexpr int kLevelColumns = 2048;  // a warp's tiles: A [16][128 B], then B [8][128 B]
constexpr int kLevels = 4;

// One level of this warp's channels; the 16 x 8 product goes to `parts` [level][entry of a lane][lane], fp32.
// decay: prefix sums of log2 decays of two channels [token][2]; raw: this warp's half of the raw q tile, k 4096 behind it.
template <int kLevel>
DEVICE void run_level(u32 parts, u32 tiles, u32 raw, int lane, const float* decay) {
    constexpr int half = 1 << kLevel;
    const u32 word = lane * 4;
    float products[4] = {0, 0, 0, 0};
#pragma unroll
    for (int t = 0; t < 16; t++) {
        const int anchor = (t >> (kLevel + 1) << (kLevel + 1)) + half - 1;
        const bool row = t & half;
        const float d0 = decay[2 * t] - decay[2 * anchor], d1 = decay[2 * t + 1] - decay[2 * anchor + 1];
        const float e0 = exp2_approx(row ? d0 : -d0), e1 = exp2_approx(row ? d1 : -d1);
        const u32 key_raw = load_shared(raw + 4096 + t * 128 + (word ^ ((t & 7) << 4)));
        const u32 key = pack_bf16(low_bf16(key_raw) * e0, high_bf16(key_raw) * e1);
        if (row) {
            const int r = t - half;
            const u32 query = load_shared(raw + t * 128 + (word ^ ((t & 7) << 4)));
            store_shared(tiles + t * 128 + (word ^ ((t & 7) << 4)), key);
            store_shared(tiles + r * 128 + (word ^ ((r & 7) << 4)),
                         pack_bf16(low_bf16(query) * e0, high_bf16(query) * e1));
        } else {
            const int n = (t >> (kLevel + 1) << kLevel) | (t & (half - 1));
            store_shared(tiles + kLevelColumns + n * 128 + (word ^ (n << 4)), key);
        }
    }
    __syncwarp();
#pragma unroll
    for (int two = 0; two < 2; two++) {
        u32 b[4], a0[4], a1[4];
        load_matrix(b, b_operand_8rows(tiles + kLevelColumns, lane, two));
        load_matrix(a0, a_operand(tiles, lane, 2 * two));
        load_matrix(a1, a_operand(tiles, lane, 2 * two + 1));
        mma(products, a0, b[0], b[1]);
        mma(products, a1, b[2], b[3]);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) store_shared_float(parts + (kLevel * 4 + e) * 128 + lane * 4, products[e]);
    __syncwarp();
}

// The last phase, after both warps of the group left their parts. Warp 1: query scales and the diagonal of Aqk.
// Warp 0: key scales; adds the two warps' parts; L and the rest of Aqk; the solve.
DEVICE void intra_unbounded(u32 parts, u32 other_parts, u32 raw, u32 stage, u32 scratch, int warp, int lane,
                            int rows, float beta, bool l2norm, float scale) {
    float norms[8] = {0, 0, 0, 0, 0, 0, 0, 0}, diagonal[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    const u32 x_raw = raw + (warp == 0 ? 4096 : 0);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int s = 0; s < 4; s++) {
            u32 x[4], y[4];
            load_matrix(x, a_operand(x_raw + half * 2048, lane, s));
            square_step(norms, x);
            if (warp == 1) {
                load_matrix(y, a_operand(raw + 4096 + half * 2048, lane, s));
                mma(diagonal, x, y[0], y[2]);
                mma(diagonal + 4, x, y[1], y[3]);
            }
        }
    const int g = lane >> 2;
    if (on_diagonal(lane)) {
        const float low = l2norm ? inverse_sqrt(diagonal_low(norms, lane) + 1e-6f) : 1.f;
        const float high = l2norm ? inverse_sqrt(diagonal_high(norms, lane) + 1e-6f) : 1.f;
        const float x = g < rows ? low * scale : 0.f, y = g + 8 < rows ? high * scale : 0.f;
        store_shared_float(stage + Stage::row_scale + warp * 64 + g * 4, x);
        store_shared_float(stage + Stage::row_scale + warp * 64 + g * 4 + 32, y);
        if (warp == 0) {
            store_shared_float(scratch + Scratch::key_scale + g * 4, x);
            store_shared_float(scratch + Scratch::key_scale + g * 4 + 32, y);
        } else {
            const u32 to = stage + Stage::intra;
            store_shared_low(to + small_matrix(g, g), pack_bf16(diagonal_low(diagonal, lane), 0.f));
            store_shared_low(to + small_matrix(g + 8, g + 8), pack_bf16(diagonal_high(diagonal, lane), 0.f));
        }
    }
    if (warp == 1) return;
    __syncwarp();
#pragma unroll
    for (int level = 0; level < kLevels; level++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u32 at = (level * 4 + e) * 128 + lane * 4;
            const float x = load_shared_float(parts + at) + load_shared_float(other_parts + at);
            const int r = g + (e & 2) * 4, n = 2 * (lane & 3) + (e & 1);
            const int j = ((n >> level) << (level + 1)) | (n & ((1 << level) - 1));
            const bool is_key = (r >> level) & 1;
            const int i = is_key ? r : r + (1 << level);
            const float beta_i = __shfl_sync(kAllLanes, beta, i);
            if ((i >> (level + 1)) != (j >> (level + 1))) continue;
            if (is_key)
                store_shared_float(lower_entry(scratch, i, j),
                                   x * beta_i * load_shared_float(scratch + Scratch::key_scale + i * 4) *
                                       load_shared_float(scratch + Scratch::key_scale + j * 4));
            else
                store_shared_low(stage + Stage::intra + small_matrix(i, j), pack_bf16(x, 0.f));
        }
    __syncwarp();
    solve_and_store(stage, scratch, lane, beta);
}
