// States between a pool in global memory and the accumulators of a consumer warpgroup.
//
// A warpgroup holds 64 rows (V) by 128 columns (K). Lane (g = lane / 4, c = lane % 4) of warp w has, in state[4 j + 2
// i], state[4 j + 2 i + 1], row 16 w + g + 8 i and columns 8 j + 2 c, 8 j + 2 c + 1.
#pragma once
#include "scalar.cuh"

// How a pool lies: element type, V-first or K-first, and whether two neighbouring columns may be moved at once.
struct PoolLayout {
    bool is_float, v_first, vectors;
};

// Offset of state[2 t] from state[0] in a V-first matrix.
DEVICE constexpr int state_word(int t) { return (t & 1) * 8 * 128 + (t >> 1) * 8; }

// `offset`: elements from the base to this head's matrix; `row`, `column`: of state[0].
DEVICE void load_state(float* state, const void* base, i64 offset, int row, int column, PoolLayout layout) {
    if (layout.vectors) {
        const i64 at = offset + row * 128 + column;
        if (layout.is_float) {
#pragma unroll
            for (int t = 0; t < 32; t++) {
                const Pair x = *reinterpret_cast<const Pair*>(static_cast<const float*>(base) + at + state_word(t));
                state[2 * t] = x.x;
                state[2 * t + 1] = x.y;
            }
        } else {
#pragma unroll
            for (int t = 0; t < 32; t++) {
                const u32 x = *reinterpret_cast<const u32*>(static_cast<const u16*>(base) + at + state_word(t));
                state[2 * t] = low_bf16(x);
                state[2 * t + 1] = high_bf16(x);
            }
        }
        return;
    }
    const int row_stride = layout.v_first ? 128 : 1, column_stride = layout.v_first ? 1 : 128;
#pragma unroll
    for (int t = 0; t < 64; t++) {
        const int r = row + (t & 2) * 4, c = column + (t >> 2) * 8 + (t & 1);
        state[t] = load_element(base, offset + r * row_stride + c * column_stride, layout.is_float);
    }
}

// Brings a head's matrix into the L2 cache; `thread` of `threads`.
DEVICE void prefetch_state(const void* base, i64 offset, bool is_float, int thread, int threads) {
    const char* from = static_cast<const char*>(base) + offset * (is_float ? 4 : 2);
    for (int at = thread * 128; at < 128 * 128 * (is_float ? 4 : 2); at += threads * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
}

// As load_state; every element times `scale`.
DEVICE void store_state(const float* state, void* base, i64 offset, int row, int column, PoolLayout layout,
                        float scale) {
    if (layout.vectors) {
        const i64 at = offset + row * 128 + column;
        if (layout.is_float) {
#pragma unroll
            for (int t = 0; t < 32; t++)
                *reinterpret_cast<Pair*>(static_cast<float*>(base) + at + state_word(t)) =
                    Pair{state[2 * t] * scale, state[2 * t + 1] * scale};
        } else {
#pragma unroll
            for (int t = 0; t < 32; t++)
                *reinterpret_cast<u32*>(static_cast<u16*>(base) + at + state_word(t)) =
                    pack_bf16(state[2 * t] * scale, state[2 * t + 1] * scale);
        }
        return;
    }
    const int row_stride = layout.v_first ? 128 : 1, column_stride = layout.v_first ? 1 : 128;
#pragma unroll
    for (int t = 0; t < 64; t++) {
        const int r = row + (t & 2) * 4, c = column + (t >> 2) * 8 + (t & 1);
        store_element(base, offset + r * row_stride + c * column_stride, layout.is_float, state[t] * scale);
    }
}
