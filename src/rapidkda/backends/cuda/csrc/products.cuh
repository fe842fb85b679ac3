// Products within a chunk, from the decayed tiles to (I + L)^-1 and Aqk. Each warp multiplies over its own 64 channels,
// the two add up what they have.
#pragma once
#include "decays.cuh"
#include "solve.cuh"

// Products over the 64 channels of this warp, which wrote all of their operands itself. Each 16-row operand is 8 rows
// of k over 8 rows of q, so that a product's upper half is the solver's, the lower one the other warp's.
struct Products {
    float first[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0}, across[4] = {0, 0, 0, 0};
};
// With two anchors, kd and qd then become what the recurrence wants, decayed from the chunk's start and not shifted.
// factors: of these channels, see Anchors.
template <class Gate>
DEVICE Products multiply_own(u32 inverse, u32 kd, u32 factors, int lane) {
    Products x;
    u32 across[8], start[8];  // as the columns of an operand whose rows are all the same
    if constexpr (Gate::anchors == 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_matrix(across + 4 * i, factors + i * 64 + (lane >> 3) * 16);
            load_matrix(start + 4 * i, factors + 128 + i * 64 + (lane >> 3) * 16);
        }
    }
    const u32 rows = a_operand_split(kd, lane, 0, 2048), columns = b_operand(inverse, lane, 0);
    u32 a[4][4], a_second[4][4];
#pragma unroll
    for (int s = 0; s < 4; s++) {
        u32 b[4];
        load_matrix(a[s], rows ^ (32 * s));
        load_matrix(a_second[s], (rows ^ (32 * s)) + 1024);
        load_matrix(b, columns ^ (32 * s));
        mma(x.first, a[s], b[0], b[1]);
        mma(x.second, a_second[s], b[2], b[3]);
        if constexpr (Gate::anchors == 2) {
            b[0] = multiply_bf16(b[0], across[2 * s]);
            b[1] = multiply_bf16(b[1], across[2 * s + 1]);
        }
        mma(x.across, a_second[s], b[0], b[1]);
    }
    __syncwarp();  // what other lanes have read is written over
    if constexpr (Gate::anchors == 2) {
#pragma unroll
        for (int s = 0; s < 4; s++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a[s][i] = multiply_bf16(a[s][i], Gate::to_rows);
                a_second[s][i] = multiply_bf16(a_second[s][i], start[2 * s + (i >> 1)]);
            }
            store_matrix(rows ^ (32 * s), a[s]);
            store_matrix((rows ^ (32 * s)) + 1024, a_second[s]);
        }
    }
    return x;
}

// The two warps of a group add up their products, each those of its own rows: of k (kRows 0) or of q (kRows 2).
struct Sums {
    Pair first, across, second;
};
template <int kRows>
DEVICE void give(u32 to, const Products& x) {
    store_shared_pair(to, x.first[kRows], x.first[kRows + 1]);
    store_shared_pair(to + 256, x.across[kRows], x.across[kRows + 1]);
    store_shared_pair(to + 512, x.second[kRows], x.second[kRows + 1]);
}
template <class Gate, int kRows>
DEVICE Sums take(u32 from, const Products& x) {
    const Pair first = load_shared_pair(from), across = load_shared_pair(from + 256),
               second = load_shared_pair(from + 512);
    constexpr float unshift = Gate::across_unshift;
    return Sums{{x.first[kRows] + first.x, x.first[kRows + 1] + first.y},
                {(x.across[kRows] + across.x) * unshift, (x.across[kRows + 1] + across.y) * unshift},
                {x.second[kRows] + second.x, x.second[kRows + 1] + second.y}};
}

// The solver: the keys' scales, L, scaled, into the scratch, and the solve. The other: Aqk into the stage.
// own, other: inverse-decayed keys of the two warps, where the exchange takes place; betas: write strengths; exchange: a
// named barrier; exchange_read: where the solver tells that it has read, if it `tells`; strong: bits of tokens with
// strong writes; low_keys: whether the low parts of keys go with them.
template <class Gate>
DEVICE void combine(const Products& products, u32 own, u32 other, u32 stage, u32 scratch, u32 scales, bool solver,
                    int lane, u32 betas, int rows, bool l2norm, int exchange, Handover exchange_read, bool tells,
                    u32 strong, bool low_keys) {
    Strengths beta{};
    if (solver) beta = load_strengths(betas, lane);
    if (solver)
        give<2>(own + lane * 8, products);
    else
        give<0>(own + lane * 8, products);
    meet(exchange, 64);
    const int g = lane >> 2, c = 2 * (lane & 3);
    if (!solver) {
        const Sums x = take<Gate, 2>(other + lane * 8, products);
        const u32 own_scale = scales + 64 + scale_of(g);
        const float scale = load_shared_float(own_scale), scale8 = load_shared_float(own_scale + 8);
        const u32 to = stage + Stage::intra + g * 16 + c * 2;
        store_shared(to, pack_f16(lower(scale * x.first.x, g, c), lower(scale * x.first.y, g, c + 1)));
        store_shared(to + 128, pack_f16(scale8 * x.across.x, scale8 * x.across.y));
        store_shared(to + 256, 0u);
        store_shared(to + 384, pack_f16(lower(scale8 * x.second.x, g, c), lower(scale8 * x.second.y, g, c + 1)));
        return;
    }
    const Sums x = take<Gate, 0>(other + lane * 8, products);
    if (tells) exchange_read.arrive();
    const int odd = g & 1;
    const LowerScales y = lower_scales(scales, stage, odd ? x.first.y : x.first.x, odd ? x.second.y : x.second.x, lane,
                                       rows, l2norm, Gate::rows_unshift, beta);
    const LowerEntries l{{x.first.x * y.row * y.columns.x, x.first.y * y.row * y.columns.y,
                          x.across.x * y.row8 * y.columns.x, x.across.y * y.row8 * y.columns.y,
                          x.second.x * y.row8 * y.columns.z, x.second.y * y.row8 * y.columns.w}};
    store_lower(scratch, lane, l);
    const bool marks = __any_sync(kAllLanes, alike(lane, l) | (strong != 0));
    __syncwarp();
    solve_and_store(stage, scratch, scales, lane, beta);
    if (rarely(marks)) store_marks(stage, lane, warp_max(tokens_alike(lane, l)), strong, low_keys);
}
