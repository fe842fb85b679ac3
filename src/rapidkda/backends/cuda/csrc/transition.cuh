// The affine transition of a part, S -> S M + B: how it lies in memory, and its application to a state in registers.
//
// B lies like a state, M with its columns in an order of its own: of every 32, column 8 t + g lies at 4 g + t, so that a
// lane of an mma.sync reads what it needs of a row for four tiles at once, and what a lane of the consumers has of a row
// is a run of eight. The product is taken in high and low bf16 parts: 16 bits, as good as the states it is made of.
#pragma once
#include "mma.cuh"
#include "state.cuh"

// `row`: of state[0]; q: lane % 4.
DEVICE void store_transition(const float* state, float* to, int row, int q, float scale) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int block = 0; block < 4; block++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float* s = state + 16 * block + 2 * i + e;
                *reinterpret_cast<Quad*>(to + (row + 8 * i) * 128 + 32 * block + 4 * (2 * q + e)) =
                    Quad{s[0] * scale, s[4] * scale, s[8] * scale, s[12] * scale};
            }
}

DEVICE void split_bf16(u32& high, u32& low, float x, float y) {
    high = pack_bf16(x, y);
    low = pack_bf16(x - low_bf16(high), y - high_bf16(high));
}

// state <- state M + B; `offset`: of B, with M behind it; `row`, `column`: of state[0].
DEVICE void apply_transition(float* state, const float* transitions, i64 offset, int row, int column, int lane) {
    const int g = lane >> 2, q = lane & 3;
    float next[64];
    load_state(next, transitions, offset, row, column, PoolLayout{true, true, true});
    const float* from = transitions + offset + 128 * 128 + 2 * q * 128 + 4 * g;
#pragma unroll
    for (int s = 0; s < 8; s++) {
        u32 high[4], low[4];
#pragma unroll
        for (int t = 0; t < 4; t++) split_bf16(high[t], low[t], state[8 * s + 2 * t], state[8 * s + 2 * t + 1]);
#pragma unroll
        for (int block = 0; block < 4; block++) {
            Quad m[4];  // rows 2q, 2q + 1, 2q + 8, 2q + 9 of these 16
#pragma unroll
            for (int r = 0; r < 4; r++)
                m[r] = *reinterpret_cast<const Quad*>(from + (16 * s + (r & 1) + (r >> 1) * 8) * 128 + 32 * block);
            auto tile = [&](int t, float a, float b, float c, float d) {
                u32 first, first_low, second, second_low;
                split_bf16(first, first_low, a, b);
                split_bf16(second, second_low, c, d);
                float* to = next + 16 * block + 4 * t;
                mma(to, low, first, second);
                mma(to, high, first_low, second_low);
                mma(to, high, first, second);
            };
            tile(0, m[0].x, m[1].x, m[2].x, m[3].x);
            tile(1, m[0].y, m[1].y, m[2].y, m[3].y);
            tile(2, m[0].z, m[1].z, m[2].z, m[3].z);
            tile(3, m[0].w, m[1].w, m[2].w, m[3].w);
        }
    }
#pragma unroll
    for (int t = 0; t < 64; t++) state[t] = next[t];
}
