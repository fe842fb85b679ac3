// The convolution in front of the recurrence, in the producers: q, k and v arrive as they were before it, each chunk
// with the three tokens before it, and are convolved over four tokens and passed through SiLU where the warp's own
// channels lie. A segment's first chunk takes those three tokens from its history instead.
#pragma once
#include "copy.cuh"
#include "layout.cuh"
#include "neighbours.cuh"
#include "shared.cuh"

// Row `row` of tensor `x` (q, k, v), half `half` of the three rows before a chunk; the lane's word.
template <class C>
DEVICE u32 before_word(u32 raw, int x, int half, int row, u32 word) {
    const int line = x * 6 + half * 3 + row;
    return raw + C::raw_before + line * 128 + (word ^ ((line & 7) << 4));
}

// V, and the rows before each chunk of q, k and v: beside q, k and g on the same barrier. One thread.
template <class C>
DEVICE void load_before(const Params& p, const Neighbours& b, u32 raw, int token, int query_head, int head, u32 bar) {
    copy_tile(raw + C::raw_v, &p.v, token, 0, head, bar);
    copy_tile(raw + C::raw_v + 2048, &p.v, token, 1, head, bar);
    copy_tile(raw + C::raw_before, &b.q_before, token - 3, 0, query_head, bar);
    copy_tile(raw + C::raw_before + 768, &b.k_before, token - 3, 0, query_head, bar);
    copy_tile(raw + C::raw_before + 1536, &b.v_before, token - 3, 0, head, bar);
}

// First of the channels of head `head` of q, k or v (x: 0, 1, 2) in [q | k | v].
DEVICE int first_channel(const Params& p, int x, int query_head, int head) {
    const int heads = p.value_heads / p.group;
    return 128 * (x == 0 ? query_head : x == 1 ? heads + query_head : 2 * heads + head);
}

// The rows before a segment's first chunk: its history, or zeros. This lane's two channels.
template <class C>
DEVICE void write_history(const Params& p, const Neighbours& b, const Work& w, u32 raw, int query_head, int warp, int lane) {
    const bool kept = has_history(p, b, w.segment);
    const i64 at = kept ? history_slot(p, b, w.segment) * b.conv_slot_stride +
                              history_offset(b, w.segment) * b.conv_entry_stride
                        : 0;
#pragma unroll 1
    for (int x = 0; x < 3; x++) {
        const int channel = first_channel(p, x, query_head, w.head) + 64 * warp + 2 * lane;
        const u16* from = b.conv_pool + at + channel * b.conv_channel_stride;
#pragma unroll
        for (int row = 0; row < 3; row++) {
            u32 both = 0u;
            if (kept)
                both = from[row * b.conv_entry_stride] |
                       static_cast<u32>(from[row * b.conv_entry_stride + b.conv_channel_stride]) << 16;
            store_shared(before_word<C>(raw, x, warp, row, lane * 4), both);
        }
    }
}

// x = h + h tanh(h) with h = x / 2. The hardware's tanh is good to 2^-11, a quarter of the rounding that follows.
DEVICE float silu_of_half(float h) {
    float t;
    asm("tanh.approx.f32 %0,%1;" : "=f"(t) : "f"(h));
    return fmaf(h, t, h);
}

// This lane's two channels of one tensor, 16 rows in `words`: read, convolved. `weight`: of the first channel.
template <class C>
DEVICE void convolve(u32* words, const float* weight, u32 raw, u32 tile, int x, int warp, int lane) {
    Quad a = *reinterpret_cast<const Quad*>(weight), b = *reinterpret_cast<const Quad*>(weight + 4);
    const u32 word = lane * 4;
    u32 before[3];
#pragma unroll
    for (int row = 0; row < 3; row++) before[row] = load_shared(before_word<C>(raw, x, warp, row, word));
#pragma unroll
    for (int t = 0; t < 16; t++) words[t] = load_shared(tile + t * 128 + (word ^ ((t & 7) << 4)));
    a = Quad{0.5f * a.x, 0.5f * a.y, 0.5f * a.z, 0.5f * a.w};
    b = Quad{0.5f * b.x, 0.5f * b.y, 0.5f * b.z, 0.5f * b.w};
    float a0 = low_bf16(before[0]), a1 = low_bf16(before[1]), a2 = low_bf16(before[2]);
    float b0 = high_bf16(before[0]), b1 = high_bf16(before[1]), b2 = high_bf16(before[2]);
#pragma unroll
    for (int t = 0; t < 16; t++) {
        const float a3 = low_bf16(words[t]), b3 = high_bf16(words[t]);
        const float y = fmaf(a.w, a3, fmaf(a.z, a2, fmaf(a.y, a1, a.x * a0)));
        const float z = fmaf(b.w, b3, fmaf(b.z, b2, fmaf(b.y, b1, b.x * b0)));
        words[t] = pack_bf16(silu_of_half(y), silu_of_half(z));
        a0 = a1;
        a1 = a2;
        a2 = a3;
        b0 = b1;
        b1 = b2;
        b2 = b3;
    }
}

// Rows of this lane's two channels into one half of a swizzled tile.
DEVICE void store_values(const u32* words, u32 half, u32 word) {
#pragma unroll
    for (int t = 0; t < 16; t++) store_shared(half + t * 128 + (word ^ ((t & 7) << 4)), words[t]);
}

// V of a chunk goes from where it was convolved into its stage, once that is free; in a cluster, each half into the CTA
// that needs it. One warp, its own half; `announces`: the one of the two that tells the peer how many bytes will come.
template <class C>
DEVICE void hand_values_over(u32 raw, u32 stage, u32 full, u32 rank, int warp, int lane, bool announces) {
    u32 from = raw + warp * 2048 + lane * 16;  // hidden, so that no sum with what follows is kept over the loop
    asm volatile("" : "+r"(from));
    from += C::raw_v;
    const u32 to = stage + Stage::v + (C::kForm == Form::kWhole ? warp * 2048 : 0) + lane * 16;
    if constexpr (C::kCluster)
        if (announces && lane == 0) barrier_expect_remote(full, rank ^ 1, Stage::prepared + 2048);
    __syncwarp();  // other lanes wrote what this one moves
    Words4 words[4];
#pragma unroll
    for (int t = 0; t < 4; t++) words[t] = load_shared_words4(from + t * 512);
    if (!C::kCluster || warp == rank) {
#pragma unroll
        for (int t = 0; t < 4; t++) store_shared_words4(to + t * 512, words[t]);
        return;
    }
    u32 remote, bar;
    asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(remote) : "r"(to), "r"(rank ^ 1));
    asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(bar) : "r"(full), "r"(rank ^ 1));
#pragma unroll
    for (int t = 0; t < 4; t++)
        asm volatile(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0],{%1,%2,%3,%4},[%5];" ::"r"(
                remote + t * 512),
            "r"(words[t].x), "r"(words[t].y), "r"(words[t].z), "r"(words[t].w), "r"(bar)
            : "memory");
}

// q, k and v in place.
template <class C>
DEVICE void convolve_chunk(const Params& p, const Neighbours& b, u32 raw, int query_head, int head, int warp, int lane) {
    const float* weight = b.conv_weight + 4 * (64 * warp + 2 * lane);
#pragma unroll 1  // small code: what all groups run at once has to stay in the instruction cache
    for (int x = 0; x < 3; x++) {
        const u32 tile = raw + (x < 2 ? x * 4096 : C::raw_v) + warp * 2048;
        u32 words[16];
        convolve<C>(words, weight + 4 * first_channel(p, x, query_head, head), raw, tile, x, warp, lane);
        store_values(words, tile, lane * 4);
    }
}
