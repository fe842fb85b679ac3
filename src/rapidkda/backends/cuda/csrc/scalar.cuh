// Types and scalar arithmetic. Kernels are compiled by NVRTC without any header of the toolkit, so these are ours.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

template <bool kFirst, class A, class B>
struct Select {
    using Type = A;
};
template <class A, class B>
struct Select<false, A, B> {
    using Type = B;
};

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr u32 kAllLanes = 0xffffffffu;

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float inverse_sqrt(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float sigmoid(float x) { return reciprocal(1.f + exp2_approx(-kLog2E * x)); }

// Two bf16 in a word, the first in the low half.
DEVICE u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEVICE float low_bf16(u32 word) { return __uint_as_float(word << 16); }
DEVICE float high_bf16(u32 word) { return __uint_as_float(word & 0xffff0000u); }
// Both halves of a word times those of another.
DEVICE u32 multiply_bf16(u32 x, u32 y) {
    u32 r;
    asm("mul.rn.bf16x2 %0,%1,%2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}
// The same in fp16.
DEVICE u32 pack_f16(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEVICE u32 multiply_f16(u32 x, u32 y) {
    u32 r;
    asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}
DEVICE float low_f16(u32 word) {
    float x;
    asm("{.reg .b16 a,b; mov.b32 {a,b},%1; cvt.f32.f16 %0,a;}" : "=f"(x) : "r"(word));
    return x;
}
DEVICE float high_f16(u32 word) {
    float x;
    asm("{.reg .b16 a,b; mov.b32 {a,b},%1; cvt.f32.f16 %0,b;}" : "=f"(x) : "r"(word));
    return x;
}
DEVICE float load_bf16(const void* p) { return __uint_as_float(static_cast<u32>(*static_cast<const u16*>(p)) << 16); }

// What tf32 keeps of an fp32.
DEVICE float cut_tf32(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// For branches hardly ever taken: their code lies out of the way.
DEVICE bool rarely(bool x) { return __builtin_expect(x, false); }

// Largest of an unsigned value over the warp.
DEVICE u32 warp_max(u32 x) {
    u32 r;
    asm volatile("redux.sync.max.u32 %0,%1,0xffffffff;" : "=r"(r) : "r"(x));
    return r;
}

// This thread's lane, read anew: what is computed from it inside a loop is not hoisted out of it, where it would live
// in registers that the loop does not have.
DEVICE int fresh_lane() {
    int lane;
    asm volatile("mov.u32 %0,%%laneid;" : "=r"(lane));
    return lane;
}

// The same, but sums with it are made where they are used instead of being kept in a register.
DEVICE u32 not_hoisted(u32 x) {
    u32 y;
    asm volatile("mov.u32 %0,%1;" : "=r"(y) : "r"(x));
    return y;
}

// A lane's own value from a shuffle: the assembler keeps it instead of making it anew wherever it is used.
DEVICE u32 kept(u32 x, int lane) { return __shfl_sync(kAllLanes, x, lane); }

struct alignas(8) Pair {
    float x, y;
};
struct alignas(16) Quad {
    float x, y, z, w;
};
struct Words2 {
    u32 x, y;
};
struct Words4 {
    u32 x, y, z, w;
};

// An fp32 or bf16 element.
DEVICE float load_element(const void* base, i64 index, bool is_float) {
    return is_float ? static_cast<const float*>(base)[index] : load_bf16(static_cast<const u16*>(base) + index);
}
DEVICE void store_element(void* base, i64 index, bool is_float, float x) {
    if (is_float)
        static_cast<float*>(base)[index] = x;
    else
        static_cast<u16*>(base)[index] = static_cast<u16>(pack_bf16(x, 0.f));
}
