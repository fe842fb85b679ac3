// The gated norm behind the recurrence: out = o rsqrt(mean o^2 + eps) weight activation(z), in the producers, which are
// not the limit. Consumers leave a chunk's output in its stage, over V, each warp in the columns that it alone has read.
// The group of producers that the stage belongs to norms it when the stage comes round empty, and only then lets the
// next V in. z of a chunk is asked for when its stage is filled, a round before it is needed.
#pragma once
#include "copy.cuh"
#include "layout.cuh"
#include "neighbours.cuh"
#include "shared.cuh"

// What lies in a group's stage: the output of the chunk that starts at `token`, `rows` of its 16 (0: nothing yet).
struct Output {
    int token, rows, head, turn;
};

template <class C>
DEVICE void load_z(const Neighbours& b, u32 shared, int group, int token, int head) {  // one thread
    const u32 bar = shared + C::z_full + 8 * group;
    barrier_expect(bar, 4096);
    copy_tile(shared + C::z + group * 4096, &b.z, token, 0, head, bar);
}

// 2 x sigmoid(z). The hardware's tanh is good to 2^-11, a quarter of the rounding that follows.
DEVICE float gated(float x, float z) {
    float t;
    asm("tanh.approx.f32 %0,%1;" : "=f"(t) : "f"(0.5f * z));
    return fmaf(x, t, x);
}

// Half of a chunk's tokens, one warp: 8 lanes a token, 8 channels each in either half.
template <class C>
DEVICE void norm_output(const Params& p, const Neighbours& b, u32 shared, int group, int warp, int lane, const Output& output) {
    if (output.rows == 0) return;
    const int piece = lane & 7, row = lane >> 3;
    const u32 at = (8 * warp + row) * 128 + ((piece ^ row) << 4);
    u32 tile = shared + C::stages + group * C::kStageBytes + Stage::v + at, z = shared + C::z + group * 4096 + at;
    const u32 weights = shared + C::norm_weight + piece * 32;
    u16* out = p.out + (output.token + 8 * warp + row) * p.out_token_stride + output.head * p.out_head_stride + 8 * piece;
    int left = output.rows - (8 * warp + row);
    barrier_wait(shared + C::z_full + 8 * group, output.turn & 1);
#pragma unroll 1
    for (int step = 0; step < 2; step++) {  // four tokens each
        Words4 o[2], gate[2];
#pragma unroll
        for (int half = 0; half < 2; half++) o[half] = load_shared_words4(tile + half * 2048);
#pragma unroll
        for (int half = 0; half < 2; half++) gate[half] = load_shared_words4(z + half * 2048);
        float sums[4] = {0, 0, 0, 0};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 from[4] = {o[half].x, o[half].y, o[half].z, o[half].w};
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const float low = low_bf16(from[t]), high = high_bf16(from[t]);
                sums[t] = fmaf(low, low, fmaf(high, high, sums[t]));
            }
        }
        float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
        for (int other = 4; other; other >>= 1) sum += __shfl_xor_sync(kAllLanes, sum, other);
        const float scale = 0.5f * inverse_sqrt(fmaf(sum, 1.f / 128.f, b.norm_eps));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 from[4] = {o[half].x, o[half].y, o[half].z, o[half].w};
            const u32 gates[4] = {gate[half].x, gate[half].y, gate[half].z, gate[half].w};
            const Quad w0 = load_shared_quad(weights + half * 256), w1 = load_shared_quad(weights + half * 256 + 16);
            const float weight[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
            u32 words[4];
#pragma unroll
            for (int t = 0; t < 4; t++)
                words[t] = pack_bf16(gated(low_bf16(from[t]) * weight[2 * t], low_bf16(gates[t])) * scale,
                                     gated(high_bf16(from[t]) * weight[2 * t + 1], high_bf16(gates[t])) * scale);
            if (left > 0)
                asm volatile("st.global.v4.b32 [%0],{%1,%2,%3,%4};" ::"l"(out + half * 64), "r"(words[0]),
                             "r"(words[1]), "r"(words[2]), "r"(words[3])
                             : "memory");
        }
        tile = (tile + 512) ^ 64;
        z = (z + 512) ^ 64;
        left -= 4;
        out += 4 * p.out_token_stride;
    }
}

// After a group's last chunk.
template <class C>
DEVICE void norm_last_output(const Params& p, const Neighbours& b, u32 shared, int warp_index, int lane, const Output& output) {
    const int group = warp_index >> 1;
    if (output.rows == 0) return;
    barrier_wait(shared + C::empty + 8 * group, output.turn & 1);
    norm_output<C>(p, b, shared, group, warp_index & 1, lane, output);
}
