// Products within a chunk for any log decay. A decay below 2^-26 a token counts as 2^-26: what it multiplies is then
// below the resolution of fp32 sums, and 8 tokens span no more than 208 in log2. So each half of the chunk has an
// anchor of its own, at its start, as the bounded gate has one for 16 tokens: with P_t = G_t + s in the first half and
// G_t - G_7 + s in the second,
//   within a half          <x_i 2^(P_i), k_j 2^(-P_j)>
//   rows 8.., columns ..7  <x_i 2^(P_i), k_j 2^(G_7 - G_j)>, every true factor at most 1, times 2^-s
// The anchors lie before the rows that use them, so row i depends on tokens up to i only. Exponentials are as many as
// for the bounded gate: the other factors follow by multiplication.
#pragma once
#include "solve.cuh"

struct UnboundedGate {
    static constexpr float shift = 104.f;  // s: half of 8 * 26
    static constexpr float down = 0x1p-104f;
};

// This lane's two channels of the decayed tiles, as decay_bounded; decay: P. Raw q and k tiles, read for the last time
// here, make room: rows 8..15 of k and of q, decayed from the anchor G_7, over raw q; k_j 2^(G_7 - G_j) over raw k.
// end0, end1: decay of the whole chunk.
DEVICE void decay_unbounded(const float* decay, u32 raw_queries, u32 inverse, u32 kd, u32 kr, u32 word, float& end0,
                            float& end1) {
    const u32 raw_keys = raw_queries + 4096;
    const float middle0 = exp2_approx(decay[14]), middle1 = exp2_approx(decay[15]);  // 2^(G_7 + s)
    const float last0 = exp2_approx(decay[30]), last1 = exp2_approx(decay[31]);      // 2^(G_15 - G_7 + s)
    constexpr float down = UnboundedGate::down;
    const float first_half0 = middle0 * down, first_half1 = middle1 * down;
    const float second_half0 = last0 * down, second_half1 = last1 * down;
    end0 = first_half0 * second_half0;
    end1 = first_half1 * second_half1;
    u32 queries[4], keys[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
        queries[t] = load_shared(raw_queries + t * 128 + (word ^ ((t & 7) << 4)));
        keys[t] = load_shared(raw_keys + t * 128 + (word ^ ((t & 7) << 4)));
    }
#pragma unroll
    for (int t = 0; t < 16; t++) {
        const u32 at = t * 128 + (word ^ ((t & 7) << 4));
        const float k0 = low_bf16(keys[t & 3]), k1 = high_bf16(keys[t & 3]);
        const float q0 = low_bf16(queries[t & 3]), q1 = high_bf16(queries[t & 3]);
        if (t < 12) {
            const u32 ahead = (t + 4) * 128 + (word ^ (((t + 4) & 7) << 4));
            queries[t & 3] = load_shared(raw_queries + ahead);
            keys[t & 3] = load_shared(raw_keys + ahead);
        }
        const float e0 = exp2_approx(decay[2 * t]), e1 = exp2_approx(decay[2 * t + 1]);
        const float i0 = k0 * exp2_approx(-decay[2 * t]), i1 = k1 * exp2_approx(-decay[2 * t + 1]);
        store_shared(inverse + at, pack_bf16(i0, i1));
        if (t < 8) {
            store_shared(kd + at, pack_bf16(k0 * e0, k1 * e1));
            store_shared(kd + 2048 + at, pack_bf16(q0 * e0, q1 * e1));
            const float m0 = i0 * middle0, m1 = i1 * middle1;
            store_shared(raw_keys + at, pack_bf16(m0, m1));
            store_shared(kr + at, pack_f16(m0 * second_half0, m1 * second_half1));
        } else {
            const float ke0 = k0 * e0, ke1 = k1 * e1, qe0 = q0 * e0, qe1 = q1 * e1;
            store_shared(raw_queries + at - 1024, pack_bf16(ke0, ke1));
            store_shared(raw_queries + at, pack_bf16(qe0, qe1));
            store_shared(kd + at, pack_bf16(ke0 * first_half0, ke1 * first_half1));
            store_shared(kd + 2048 + at, pack_bf16(qe0 * first_half0, qe1 * first_half1));
            store_shared(kr + at, pack_f16(i0 * last0, i1 * last1));
        }
    }
}

// After both warps of the group, as multiply_bounded. Each 16-row operand is 8 rows of k over 8 rows of q, so both
// warps compute the same three 16 x 8 products and keep the half that is theirs.
template <int kInverseHalf>
DEVICE void multiply_unbounded(u32 raw, u32 inverse, u32 stage, u32 scratch, u32 scales, bool solver, int lane,
                               float beta, int rows, bool l2norm) {
    float first[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0}, across[4] = {0, 0, 0, 0};
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int two = 0; two < 2; two++) {
            u32 b_first[4], b_second[4], b_across[4], a[2][4], a_second[2][4];
            load_matrix(b_first, b_operand_8rows(inverse + half * kInverseHalf, lane, two));
            load_matrix(b_second, b_operand_8rows(inverse + half * kInverseHalf + 1024, lane, two));
            load_matrix(b_across, b_operand_8rows(raw + 4096 + half * 2048, lane, two));
#pragma unroll
            for (int s = 0; s < 2; s++) {
                load_matrix(a[s], a_operand_split(stage + Stage::kd_qd + half * 4096, lane, 2 * two + s, 2048));
                load_matrix(a_second[s], a_operand(raw + half * 2048, lane, 2 * two + s));
            }
#pragma unroll
            for (int s = 0; s < 2; s++) {
                mma(first, a[s], b_first[2 * s], b_first[2 * s + 1]);
                mma(second, a_second[s], b_second[2 * s], b_second[2 * s + 1]);
                mma(across, a_second[s], b_across[2 * s], b_across[2 * s + 1]);
            }
        }
    const int g = lane >> 2, c = 2 * (lane & 3);
    constexpr float down = UnboundedGate::down;
    if (!solver) {  // rows carry the scale of q
        const float x = load_shared_float(scales + 64 + g * 4), y = load_shared_float(scales + 96 + g * 4);
        const u32 to = stage + Stage::intra + g * 16 + c * 2;
        store_shared(to, pack_f16(lower(x * first[2], g, c), lower(x * first[3], g, c + 1)));
        store_shared(to + 128, pack_f16(y * down * across[2], y * down * across[3]));
        store_shared(to + 256, 0u);
        store_shared(to + 384, pack_f16(lower(y * second[2], g, c), lower(y * second[3], g, c + 1)));
        return;
    }
    if (l2norm)
        norm_scales(scales, stage + Stage::row_scale, g & 1 ? first[1] : first[0], g & 1 ? second[1] : second[0], lane,
                    rows, down);
    const LowerScales x = lower_scales(scales, lane, beta);
    const u32 to = lower_entry(scratch, g, c);
    constexpr int next = Scratch::lower_row;
    store_shared_float(to, first[0] * x.row * x.column.x);
    store_shared_float(to + next, first[1] * x.row * x.column.y);
    store_shared_float(to + 32, across[0] * down * x.row8 * x.column.x);
    store_shared_float(to + next + 32, across[1] * down * x.row8 * x.column.y);
    store_shared_float(to + 8 * next + 32, second[0] * x.row8 * x.column8.x);
    store_shared_float(to + 9 * next + 32, second[1] * x.row8 * x.column8.y);
    __syncwarp();
    solve_and_store(stage, scratch, scales, lane, beta);
}
