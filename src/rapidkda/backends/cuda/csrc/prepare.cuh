// The producers: from raw q, k, g, beta of a chunk to everything the recurrence needs of it (layout.cuh, Stage).
//
// Group i of two warps takes every kGroups-th chunk of this CTA. Warp w owns channels 64 w .. 64 w + 63, a lane two
// neighbouring ones, over all 16 tokens: prefix sums stay in registers. Raw tiles arrive by TMA in a ring of slots that
// the groups share. The two warps take turns as the solver, which has the longer second half of a chunk: the other one
// goes ahead. Chunks count from the kernel's start over all runs of the CTA, so producers go on to the next run while
// the consumers finish this one: chunk `base + i` is the i-th of this run.
//
// Barriers. `raw_full[slot]`: the raw tiles landed (the copy's bytes). `empty[stage]`: every consumer warp, of
// both CTAs of a cluster, is done with the stage. `full[stage]`: this group's two warps arrived and V's bytes landed;
// where the peer prepares the chunk, the bytes of its copy and of V. Named barriers of a group: `tiles_written` before
// the products within the chunk, `chunk_done` before the raw slot is filled again and, in a cluster, the stage is
// copied.
#pragma once
#include "gate.cuh"
#include "intra_bounded.cuh"
#include "intra_unbounded.cuh"
#include "row_scale.cuh"
#include "work.cuh"

template <Form kForm, bool kBounded, bool kGateFloat>
struct PrefillConfig : Config<kForm, kBounded, kGateFloat> {
    using Gate = typename Select<kBounded, BoundedGate, UnboundedGate>::Type;
};

// Bytes of V that the CTA `rank` needs of a chunk.
template <class C>
DEVICE int v_bytes(u32 rank) {
    return C::kForm == Form::kWhole ? 4096 : C::kForm == Form::kPair ? 2048 : rank == 0 ? 4096 : 0;
}

// Announce and start the loads of V, for this CTA and, in a cluster, on the peer's behalf. One thread.
template <class C>
DEVICE void load_v(const Params& p, const Work& w, u32 stage, u32 full, int token, u32 rank) {
    const u32 v = stage + Stage::v, peer = rank ^ 1;
    barrier_expect(full, v_bytes<C>(rank));
    if constexpr (C::kCluster) barrier_expect_remote(full, peer, Stage::prepared + v_bytes<C>(peer));
    if constexpr (C::kForm == Form::kWhole) {
        copy_tile(v, &p.v, token, 0, w.head, full);
        copy_tile(v + 2048, &p.v, token, 1, w.head, full);
    } else if constexpr (C::kForm == Form::kPair) {
        copy_tile(v, &p.v, token, rank, w.head, full);
        copy_tile_remote(v, &p.v, token, peer, w.head, full, peer);
    } else if (rank == 0) {
        copy_tile(v, &p.v, token, 0, w.head, full);
        copy_tile(v + 2048, &p.v, token, 1, w.head, full);
    } else {
        copy_tile_remote(v, &p.v, token, 0, w.head, full, peer);
        copy_tile_remote(v + 2048, &p.v, token, 1, w.head, full, peer);
    }
}

// Raw bits of beta of a row, decoded when they are needed: the load has a chunk's time to arrive.
DEVICE u32 load_beta(const Params& p, const Work& w, int row) {
    if (row >= w.rows) return 0u;
    const i64 at = static_cast<i64>(w.first_token + row) * p.beta_token_stride + w.head * p.beta_head_stride;
    return p.flags & kBetaFloat ? static_cast<const u32*>(p.beta)[at] : static_cast<const u16*>(p.beta)[at];
}
DEVICE float decode_beta(const Params& p, u32 bits) {
    const float x = __uint_as_float(p.flags & kBetaFloat ? bits : bits << 16);
    return p.flags & kBetaLogits ? sigmoid(x) * p.beta_scale : x;
}

// Rows past the segment's end may hold anything, of another request or none: q and k become 0, g what decays by 1.
template <class C>
DEVICE void blank_rows(u32 raw, int warp, int lane, int rows, bool raw_gate) {
    const float g = raw_gate ? __int_as_float(0xff800000) : 0.f;  // -inf: closed gates forget nothing
#pragma unroll 1
    for (int t = rows; t < kChunk; t++) {
        const u32 at = t * 128 + ((lane * 4) ^ ((t & 7) << 4)), own = raw + warp * 2048 + at;
        store_shared(own, 0u);
        store_shared(own + 4096, 0u);
        if constexpr (C::kGateFloat) {
            store_shared_float(raw + 8192 + warp * 4096 + at, g);
            store_shared_float(raw + 8192 + warp * 4096 + 2048 + at, g);
        } else {
            store_shared(own + 8192, pack_bf16(g, g));
        }
    }
}

// Gate logits of this lane's two channels, [token][2].
template <class C>
DEVICE void load_logits(float* logits, u32 tile, int warp, int lane) {
    if constexpr (C::kGateFloat) {
        const u32 from = tile + warp * 4096 + (lane >> 4) * 2048;
#pragma unroll
        for (int t = 0; t < 16; t++) {
            const Pair x = load_shared_pair(from + t * 128 + (((lane & 15) * 8) ^ ((t & 7) << 4)));
            logits[2 * t] = x.x;
            logits[2 * t + 1] = x.y;
        }
        __syncwarp();  // what this warp writes over g later lands where other lanes read
    } else {
        u32 words[16];
#pragma unroll
        for (int t = 0; t < 16; t++)
            words[t] = load_shared(tile + warp * 2048 + t * 128 + ((lane * 4) ^ ((t & 7) << 4)));
#pragma unroll
        for (int t = 0; t < 16; t++) {
            logits[2 * t] = low_bf16(words[t]);
            logits[2 * t + 1] = high_bf16(words[t]);
        }
    }
}

// In place: log2 decays, summed from each anchor (the chunk's start; for unbounded gates also its middle), plus the
// shift.
template <class C>
DEVICE void accumulate_decays(float* x, const GateChannels& gate, bool raw_gate) {
    if constexpr (C::kBounded) {
#pragma unroll
        for (int t = 0; t < 16; t++) {
            x[2 * t] = bounded_fraction(x[2 * t], gate.bias0, gate.amplitude);
            x[2 * t + 1] = bounded_fraction(x[2 * t + 1], gate.bias1, gate.amplitude);
        }
    } else if (raw_gate) {
#pragma unroll
        for (int t = 0; t < 16; t++) {
            x[2 * t] = softplus_log2_decay(x[2 * t], gate.bias0, gate.amplitude);
            x[2 * t + 1] = softplus_log2_decay(x[2 * t + 1], gate.bias1, gate.amplitude);
        }
    } else {
#pragma unroll
        for (int t = 0; t < 32; t++) x[t] = fmaxf(x[t] * kLog2E, kMinLog2Decay);
    }
    float sum0 = C::Gate::shift, sum1 = sum0;
#pragma unroll
    for (int t = 0; t < 16; t++) {
        if (!C::kBounded && t == 8) sum0 = sum1 = C::Gate::shift;
        sum0 = C::kBounded ? fmaf(x[2 * t], gate.bound, sum0) : sum0 + x[2 * t];
        sum1 = C::kBounded ? fmaf(x[2 * t + 1], gate.bound, sum1) : sum1 + x[2 * t + 1];
        x[2 * t] = sum0;
        x[2 * t + 1] = sum1;
    }
}

template <class C>
DEVICE void prepare_chunks(const Params& p, const Work& w, u32 shared, int warp_index, int this_lane, u32 rank, int n,
                           int base) {
    const int group = warp_index >> 1, warp = warp_index & 1;
    const int query_head = w.head / p.group;
    constexpr int kCtas = C::kCluster ? 2 : 1, kStep = C::kGroups * kCtas;  // chunks between two of this group
    const int first = ((C::kCluster ? 2 * group + rank : group) + kStep - base % kStep) % kStep;
    const int first_turn = (base + first) / kStep;
    const u32 scratch = shared + C::scratch + group * C::kScratch;
    const GateChannels gate = gate_channels(p, w.head, 64 * warp + 2 * this_lane);
    // Named barriers of this group.
    const int tiles_written = 1 + group, chunk_done = 1 + C::kGroups + group, inverse_read = 1 + 2 * C::kGroups + group;

    auto load_raw = [&](int i, int lane) {  // one thread, or those that arrive
        const int slot = (base + i) / kCtas % C::kSlots, token = w.first_token + i * kChunk;
        const u32 to = shared + C::raw + slot * C::kRaw, bar = shared + C::raw_full + 8 * slot;
        if (lane != 0) return barrier_arrive(bar);
        barrier_expect(bar, C::kRaw);
        copy_tile(to, &p.q, token, 0, query_head, bar);
        copy_tile(to + 4096, &p.k, token, 0, query_head, bar);
        copy_tile(to + 8192, &p.g, token, 0, w.head, bar);
    };
    constexpr int kAhead = C::kSlots * kCtas;  // chunks between two of a slot
    named_barrier(tiles_written, 64);          // both warps have left the raw tiles of the run before
    if (warp == 0 && arrives(this_lane))  // slots that this group was the last to use
#pragma unroll 1
        for (int i = (base + rank) % kCtas; i < min(n, kAhead); i += kCtas)
            if (((base + i) / kCtas + C::kSlots * (C::kGroups - 1)) % C::kGroups == group) load_raw(i, this_lane);
    u32 beta_bits = warp == (first_turn & 1) && this_lane < 16 ? load_beta(p, w, first * kChunk + this_lane) : 0u;

    const u32 half = warp * 2048;  // this warp's half of a bf16 tile
    using Gate = typename C::Gate;
    for (int i = first; i < n; i += kStep) {
        const int lane = fresh_lane();
        const u32 word = lane * 4;  // of a row
        const int turn = (base + i) / kStep, load = (base + i) / kCtas, slot = load % C::kSlots;
        const int stage_index = (base + i) % C::kStages;
        const bool solver = warp == (turn & 1);
        const u32 raw = shared + C::raw + slot * C::kRaw, stage = shared + C::stages + stage_index * C::kStageBytes;
        const u32 full = shared + C::full + 8 * stage_index, empty = shared + C::empty + 8 * stage_index;
        const u32 scales = scratch + Scratch::scales + (turn & 1) * Scratch::scales_bytes;
        const int rows = min(kChunk, w.rows - i * kChunk);
        const float beta = solver && lane < rows ? decode_beta(p, beta_bits) : 0.f;
        if (!solver && lane < 16) beta_bits = load_beta(p, w, (i + kStep) * kChunk + lane);  // the next solver
        barrier_wait(shared + C::raw_full + 8 * slot, (load / C::kSlots) & 1);
        if (rows < kChunk) {
            blank_rows<C>(raw, warp, lane, rows, p.flags & kRawGate);
            named_barrier(tiles_written, 64);  // each warp blanks its half of the channels, and scales need both
        }
        const bool l2norm = p.flags & kL2Norm;
        if (!solver)
            write_row_scales(scales + 64, raw, lane, rows, l2norm, p.scale);
        else if (!l2norm)
            write_row_scales(scales, raw + 4096, lane, rows, false, 1.f);

        float decay[32];  // of this lane's two channels: logits, then prefix sums of log2 decays from their anchor
        load_logits<C>(decay, raw + 8192, warp, lane);
        accumulate_decays<C>(decay, gate, p.flags & kRawGate);

        barrier_wait(empty, (((base + i) / C::kStages) & 1) ^ 1);
        if (!solver && lane == 0) load_v<C>(p, w, stage, full, w.first_token + i * kChunk, rank);
        __syncwarp();  // the scales are written by other lanes
        if (lane < 16 && (!solver || !l2norm))
            store_shared_float(stage + Stage::row_scale + (solver ? 0 : 64) + lane * 4,
                               load_shared_float(scales + (solver ? 0 : 64) + lane * 4) * Gate::down);
        const u32 inverse = C::kEarlyReload ? shared + C::inverse + group * 4096 : raw + 8192;
        const u32 own_inverse = inverse + warp * (C::kGateTile / 2);
        const u32 own_kd = stage + Stage::kd_qd + 2 * half, own_kr = stage + Stage::kr + half;
        float end0, end1;
        if constexpr (C::kBounded) {
            u32 keys[16];
#pragma unroll
            for (int t = 0; t < 16; t++) keys[t] = load_shared(raw + 4096 + half + t * 128 + (word ^ ((t & 7) << 4)));
            end0 = exp2_approx(decay[30]) * Gate::down;
            end1 = exp2_approx(decay[31]) * Gate::down;
            if (C::kEarlyReload && solver && i != first) named_barrier(inverse_read, 64);  // by the last solver
            decay_bounded(decay, keys, raw + half, own_inverse, own_kd, own_kr, word);
        } else {
            named_barrier(tiles_written, 64);  // both warps have read the raw tiles for their scales
            decay_unbounded(decay, raw + half, own_inverse, own_kd, own_kr, word, end0, end1);
        }
        store_shared_pair(stage + Stage::decay + (lane & 3) * Stage::decay_row + (8 * warp + (lane >> 2)) * 8, end0,
                          end1);
        named_barrier(tiles_written, 64);
        if (C::kEarlyReload && !solver && arrives(lane) && i + kAhead < n) load_raw(i + kAhead, lane);
        if constexpr (C::kBounded)
            multiply_bounded<C::kGateTile / 2>(inverse, stage, scratch, scales, solver, lane, beta, rows, l2norm,
                                               C::kEarlyReload && i + kStep < n ? inverse_read : 0);
        else
            multiply_unbounded<C::kGateTile / 2>(raw, inverse, stage, scratch, scales, solver, lane, beta, rows,
                                                 l2norm);
        fence_async_proxy();
        __syncwarp();
        if (arrives(lane)) barrier_arrive(full);
        if (!solver) {
            named_barrier_arrive(chunk_done, 64);
            continue;
        }
        named_barrier(chunk_done, 64);
        if constexpr (C::kCluster)
            if (lane == 0) copy_to_peer(stage, rank ^ 1, Stage::prepared, full);
        if (!C::kEarlyReload && arrives(lane) && i + kAhead < n) load_raw(i + kAhead, lane);
    }
}
