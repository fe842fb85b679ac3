// Tensor-core products, bf16 or fp16 in and fp32 out: mma.sync of a warp, and the wgmma forms that the recurrence uses.
#pragma once
#include "scalar.cuh"

// d[16 x 8] += a[16 x 16] b[16 x 8]
DEVICE void mma(float* d, const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d[16 x 8] += a[16 x 8] b[8 x 8]
DEVICE void mma_k8(float* d, u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// The same with fp16 operands.
DEVICE void mma_f16(float* d, const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d[16 x 8] += a[16 x 8] b[8 x 8] in tf32: fp32 words of which the last 13 bits do not count.
DEVICE void mma_tf32(float* d, float a0, float a1, float a2, float a3, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Low half of the matrix descriptor of a tile with the 128-byte swizzle: its address and the bytes between core matrices
// along its leading direction. The high half, 1024 bytes along the other one, is the same for all tiles and joined to it
// within each product: 64-bit additions would cost four instructions a product.
DEVICE u32 swizzled_tile(u32 address, int leading) { return ((address & 0x3ffff) >> 4) + (leading >> 4 << 16); }
#define TILE(low) "{\n.reg .b64 tile;\nmov.b64 tile,{" low ",0x40000040};\n"

// d[64 x N] (+)= a[64 x 16] b[16 x N]; a in registers, b a K-major tile [N][16]. Without `accumulate`, d is
// overwritten.
DEVICE void wgmma_n32(float* d, const u32* a, u32 b, int accumulate) {
    asm volatile(
        TILE("%20") ".reg .pred p;\nsetp.ne.b32 p,%21,0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},{%16,%17,%18,%19},tile,p,1,1,0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));
}
#define FLOATS8(d, o)                                                                                              \
    "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]), \
        "+f"(d[o + 7])

// d[64 x 128] += a[64 x 16] b[16 x 128]; b an N-major tile [16][128], in two halves of 64 columns.
#define WGMMA_N128(type)                                                                                           \
    asm volatile(                                                                                                  \
        TILE("%68") "wgmma.mma_async.sync.aligned.m64n128k16.f32." type " {"                                       \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"    \
        "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"  \
        "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},{%64,%65,%66,%67},tile,1,1,1,1;\n}"                              \
        : FLOATS8(d, 0), FLOATS8(d, 8), FLOATS8(d, 16), FLOATS8(d, 24), FLOATS8(d, 32), FLOATS8(d, 40),            \
          FLOATS8(d, 48), FLOATS8(d, 56)                                                                           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
DEVICE void wgmma_n128(float* d, const u32* a, u32 b) { WGMMA_N128("bf16.bf16"); }
DEVICE void wgmma_f16_n128(float* d, const u32* a, u32 b) { WGMMA_N128("f16.f16"); }

// d[16 x 8] += a[16 x 8] b[8 x 8] in TF32: of fp32 operands the low 13 bits are ignored.
DEVICE void mma_tf32(float* d, const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d[16 x 8] += a[16 x 4] b[4 x 8]
DEVICE void mma_tf32_k4(float* d, const u32* a, u32 b) {
    asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}
