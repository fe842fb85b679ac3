// Products within a chunk for the bounded gate. Its log2 decay over 16 tokens stays within 16 * 5 * log2(e) = 115.4,
// so one anchor serves the chunk: L_ij = <k_i 2^(G_i + s), k_j 2^(-G_j - s)>. The constant s centres the exponents, so
// that keys of any magnitude stay clear of both ends of the bf16 range. Row i depends on tokens up to i only.
#pragma once
#include "solve.cuh"

struct BoundedGate {
    static constexpr float shift = 56.f;  // s; its powers are exact, so undoing it is too
    static constexpr float down = 0x1p-56f;
};

// This lane's two channels of the decayed tiles. decay: G + s of both channels [token][2]. Every half of the inverse
// tile stays with one warp: it lies over g, which that warp has read.
// kd_qd, kr, inverse: this lane's words of row 0 without the swizzle term; `word` is that term's seed.
DEVICE void decay_bounded(const float* decay, const u32* keys, u32 raw_queries, u32 inverse, u32 kd, u32 kr, u32 word) {
    const float end0 = exp2_approx(decay[30]), end1 = exp2_approx(decay[31]);
    u32 queries[4];
#pragma unroll
    for (int t = 0; t < 4; t++) queries[t] = load_shared(raw_queries + t * 128 + (word ^ ((t & 7) << 4)));
#pragma unroll
    for (int t = 0; t < 16; t++) {
        const u32 at = t * 128 + (word ^ ((t & 7) << 4));
        const float e0 = exp2_approx(decay[2 * t]), e1 = exp2_approx(decay[2 * t + 1]);
        const float k0 = low_bf16(keys[t]), k1 = high_bf16(keys[t]);
        const float i0 = k0 * exp2_approx(-decay[2 * t]), i1 = k1 * exp2_approx(-decay[2 * t + 1]);
        const u32 query = queries[t & 3];
        if (t < 12) queries[t & 3] = load_shared(raw_queries + (t + 4) * 128 + (word ^ (((t + 4) & 7) << 4)));
        store_shared(kd + at, pack_bf16(k0 * e0, k1 * e1));
        store_shared(inverse + at, pack_bf16(i0, i1));
        store_shared(kr + at, pack_f16(i0 * end0, i1 * end1));
        store_shared(kd + 2048 + at, pack_bf16(low_bf16(query) * e0, high_bf16(query) * e1));
    }
}

// After both warps of the group. The solver: the keys' scales, L, scaled, into the scratch, and the solve. The other:
// Aqk into the stage.
// inverse: inverse-decayed keys, halves kInverseHalf apart; beta: of token `lane` (solver, lane < 16); inverse_read: the
// named barrier at which the solver tells that it has read `inverse`, or 0.
template <int kInverseHalf>
DEVICE void multiply_bounded(u32 inverse, u32 stage, u32 scratch, u32 scales, bool solver, int lane, float beta,
                             int rows, bool l2norm, int inverse_read) {
    float products[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    const u32 decayed = stage + Stage::kd_qd + (solver ? 0 : 2048);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 a[4][4], b[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++) {
            load_matrix(a[s], a_operand(decayed + half * 4096, lane, s));
            load_matrix(b[s], b_operand(inverse + half * kInverseHalf, lane, s));
        }
#pragma unroll
        for (int s = 0; s < 4; s++) {
            mma(products, a[s], b[s][0], b[s][1]);
            mma(products + 4, a[s], b[s][2], b[s][3]);
        }
    }
    const int g = lane >> 2, c = 2 * (lane & 3);
    if (!solver) {  // rows carry the scale of q
        const float x = load_shared_float(scales + 64 + g * 4), y = load_shared_float(scales + 96 + g * 4);
        const u32 to = stage + Stage::intra + g * 16 + c * 2;
        store_shared(to, pack_f16(lower(x * products[0], g, c), lower(x * products[1], g, c + 1)));
        store_shared(to + 128, pack_f16(y * products[2], y * products[3]));
        store_shared(to + 256, 0u);
        store_shared(to + 384, pack_f16(lower(y * products[6], g, c), lower(y * products[7], g, c + 1)));
        return;
    }
    if (inverse_read) named_barrier_arrive(inverse_read, 64);
    if (l2norm)
        norm_scales(scales, stage + Stage::row_scale, g & 1 ? products[1] : products[0],
                    g & 1 ? products[7] : products[6], lane, rows, BoundedGate::down);
    const LowerScales x = lower_scales(scales, lane, beta);
    const u32 to = lower_entry(scratch, g, c);
    constexpr int next = Scratch::lower_row;
    store_shared_float(to, products[0] * x.row * x.column.x);
    store_shared_float(to + next, products[1] * x.row * x.column.y);
    store_shared_float(to + 32, products[2] * x.row8 * x.column.x);
    store_shared_float(to + next + 32, products[3] * x.row8 * x.column.y);
    store_shared_float(to + 8 * next + 32, products[6] * x.row8 * x.column8.x);
    store_shared_float(to + 9 * next + 32, products[7] * x.row8 * x.column8.y);
    __syncwarp();
    solve_and_store(stage, scratch, scales, lane, beta);
}
