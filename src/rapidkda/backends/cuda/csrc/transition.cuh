// The affine transition of a part, S -> S M + B: how it lies in memory, and its application to a state in registers.
//
// B lies like a state in fp32. M lies as the tensor cores read it, in high and low bf16 parts, 16 bits together, as
// good as the states it is applied to: [high | low][64-column half][128 rows][128 bytes] with the 128-byte swizzle. Its
// rows and columns, and with them the columns of the states it is applied to, have the order `exchanged`, in which what
// a lane holds of a row are runs of eight.
#pragma once
#include "barrier.cuh"
#include "mma.cuh"
#include "parts.cuh"
#include "state.cuh"

constexpr int kMatrixBytes = kMatrix * 4;  // of M

// Within 32, 8 a + 2 b + c <-> 8 b + 2 a + c. As an operand or a result of the tensor cores, lane q of four has columns
// 8 j + 2 q + c, j = 0..3, of 32: elements 8 q + 2 j + c.
DEVICE int exchanged(int x) { return (x & ~30) | (x & 6) << 2 | (x & 24) >> 2; }

DEVICE void split_bf16(u32& high, u32& low, float x, float y) {
    high = pack_bf16(x, y);
    low = pack_bf16(x - low_bf16(high), y - high_bf16(high));
}

// `to`: of a transition; `row`, `column`: of state[0]; every element times `scale`. Each element is made where it is
// stored: 64 at once would cost the loop around a checkpoint the registers of its addresses.
DEVICE void store_transition(const float* state, float* to, bool is_m, int row, int column, float scale) {
    if (!is_m) {
        const u64 b = reinterpret_cast<u64>(to + row * 128 + column);
#pragma unroll
        for (int t = 0; t < 32; t++)
            asm volatile(
                "{.reg .f32 x,y; mul.f32 x,%1,%3; mul.f32 y,%2,%3; st.global.v2.f32 [%0],{x,y};}" ::"l"(
                    b + 4 * state_word(t)),
                "f"(state[2 * t]), "f"(state[2 * t + 1]), "f"(scale)
                : "memory");
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = exchanged(row) + 2 * i;
        const u64 m = reinterpret_cast<u64>(to + kMatrix + r * 32) + (((column >> 1) ^ (r & 7)) << 4);
#pragma unroll
        for (int t = 0; t < 8; t++) {  // 32 columns, and which half of a run
            const float* s = state + 16 * (t >> 1) + 8 * (t & 1) + 2 * i;
            const u64 at = (m ^ (t >> 1 & 1) << 6) + (t >> 2) * 16384 + 8 * (t & 1);
            u32 high[2], low[2];
#pragma unroll
            for (int j = 0; j < 2; j++)
                asm volatile(
                    "{.reg .f32 x,y,a,b; .reg .b32 t; mul.f32 x,%2,%4; mul.f32 y,%3,%4; cvt.rn.bf16x2.f32 %0,y,x;"
                    "shl.b32 t,%0,16; mov.b32 a,t; and.b32 t,%0,0xffff0000; mov.b32 b,t;"
                    "sub.f32 a,x,a; sub.f32 b,y,b; cvt.rn.bf16x2.f32 %1,b,a;}"
                    : "=&r"(high[j]), "=r"(low[j])
                    : "f"(s[4 * j]), "f"(s[4 * j + 1]), "f"(scale));
            asm volatile("st.global.v2.b32 [%0],{%1,%2};" ::"l"(at), "r"(high[0]), "r"(high[1]) : "memory");
            asm volatile("st.global.v2.b32 [%0],{%1,%2};" ::"l"(at + kMatrixBytes / 2), "r"(low[0]), "r"(low[1])
                         : "memory");
        }
    }
}

// next += state M; m: of M in shared memory; high, low: the state as the A operand of its products. A warpgroup.
DEVICE void start_transition(float* next, const u32* high, const u32* low, u32 m) {
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 8; s++) {
        const u32 tile = swizzled_tile(m, 16384) + s * (2048 / 16), low_tile = tile + kMatrixBytes / 2 / 16;
        wgmma_n128(next, low + 4 * s, tile);
        wgmma_n128(next, high + 4 * s, low_tile);
        wgmma_n128(next, high + 4 * s, tile);
    }
    wgmma_commit();
}
