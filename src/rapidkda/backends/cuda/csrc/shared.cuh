// Shared memory by 32-bit address: plain loads and stores, ldmatrix, stmatrix, and the fence that makes ordinary stores
// visible to the tensor cores and the copy engine.
#pragma once
#include "scalar.cuh"

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

DEVICE u32 load_shared(u32 a) {
    u32 r;
    asm volatile("ld.shared.b32 %0,[%1];" : "=r"(r) : "r"(a));
    return r;
}
DEVICE float load_shared_float(u32 a) { return __uint_as_float(load_shared(a)); }
DEVICE Pair load_shared_pair(u32 a) {
    Pair r;
    asm volatile("ld.shared.v2.f32 {%0,%1},[%2];" : "=f"(r.x), "=f"(r.y) : "r"(a));
    return r;
}
DEVICE Words2 load_shared_words2(u32 a) {
    Words2 r;
    asm volatile("ld.shared.v2.b32 {%0,%1},[%2];" : "=r"(r.x), "=r"(r.y) : "r"(a));
    return r;
}
DEVICE Quad load_shared_quad(u32 a) {
    Quad r;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "r"(a));
    return r;
}
DEVICE Words4 load_shared_words4(u32 a) {
    Words4 r;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3},[%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(a));
    return r;
}
DEVICE void store_shared_words4(u32 a, Words4 v) {
    asm volatile("st.shared.v4.b32 [%0],{%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
DEVICE void store_shared(u32 a, u32 v) { asm volatile("st.shared.b32 [%0],%1;" ::"r"(a), "r"(v)); }
DEVICE void store_shared_half(u32 a, u32 v) {
    asm volatile("{.reg .b16 x; cvt.u16.u32 x,%1; st.shared.b16 [%0],x;}" ::"r"(a), "r"(v));
}
DEVICE void store_shared_float(u32 a, float v) { store_shared(a, __float_as_uint(v)); }
DEVICE void store_shared_pair(u32 a, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0],{%1,%2};" ::"r"(a), "f"(x), "f"(y));
}
DEVICE void store_shared_words2(u32 a, u32 x, u32 y) {
    asm volatile("st.shared.v2.b32 [%0],{%1,%2};" ::"r"(a), "r"(x), "r"(y));
}
DEVICE void store_shared_quad(u32 a, Quad v) {
    asm volatile("st.shared.v4.f32 [%0],{%1,%2,%3,%4};" ::"r"(a), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w));
}
// The upper bytes of the two halves of a word.
DEVICE void store_shared_upper_bytes(u32 a, u32 v) {
    asm volatile("{.reg .b16 x; .reg .b32 y; prmt.b32 y,%1,0,0x4431; cvt.u16.u32 x,y; st.shared.b16 [%0],x;}" ::"r"(a),
                 "r"(v));
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void load_matrix(u32* r, u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a));
}
DEVICE void load_matrix_transposed(u32* r, u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a));
}
DEVICE void store_matrix(u32 a, const u32* r) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(a), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3]));
}
DEVICE void store_matrix_transposed(u32 a, const u32* r) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(a), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3]));
}

// Every thread that wrote shared memory by ordinary stores runs this before the barrier that hands it to wgmma or to a
// bulk copy.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
