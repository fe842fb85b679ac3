// The producers: from raw q, k, g, beta of a chunk to everything the recurrence needs of it (layout.cuh, Stage).
//
// Group i of two warps takes every kGroups-th chunk of this CTA. Warp w owns channels 64 w .. 64 w + 63, a lane two
// neighbouring ones, over all 16 tokens: prefix sums stay in registers. Raw tiles arrive by TMA, kSlots ahead.
//
// Barriers. `raw_full[group, slot]`: the raw tiles landed (the copy's bytes). `empty[stage]`: every consumer warp, of both
// CTAs of a cluster, is done with the stage. `full[stage]`: this group's two warps arrived and V's bytes landed; where the
// peer prepares the chunk, the bytes of its copy and of V. A group-wide named barrier separates "tiles written" from
// "tiles read" and guards the reuse of the raw slot.
#pragma once
#include "gate.cuh"
#include "intra_bounded.cuh"
#include "intra_unbounded.cuh"
#include "work.cuh"

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

DEVICE float load_beta(const Params& p, const Work& w, int row) {
    if (row >= w.rows) return 0.f;
    const i64 at = static_cast<i64>(w.first_token + row) * p.beta_token_stride + w.head * p.beta_head_stride;
    return load_element(p.beta, at, p.flags & kBetaFloat);
}

template <class C>
DEVICE void prepare_chunks(const Params& p, const Work& w, u32 shared, int warp_index, int lane, u32 rank) {
    const int group = warp_index >> 1, warp = warp_index & 1;
    const int query_head = w.head / p.group, n = w.chunks;
    constexpr int kStep = C::kGroups * (C::kCluster ? 2 : 1);  // chunks between two of this group
    const int first = C::kCluster ? 2 * group + rank : group;
    const u32 scratch = shared + C::scratch + group * C::kScratch;
    const GateChannels gate = gate_channels(p, w.head, 64 * warp + 2 * lane);
    const bool l2norm = p.flags & kL2Norm;
    const float row_factor = warp == 0 ? 1.f : p.scale;
    const int id = 1 + group;  // named barrier of this group

    auto raw_slot = [&](int slot) { return shared + C::raw + (group * C::kSlots + slot) * C::kRaw; };
    auto raw_barrier = [&](int slot) { return shared + C::raw_full + 8 * (group * C::kSlots + slot); };
    auto load_raw = [&](int chunk, int slot) {  // one thread
        const u32 to = raw_slot(slot), bar = raw_barrier(slot);
        const int token = w.first_token + chunk * kChunk;
        barrier_expect(bar, C::kRaw);
        copy_tile(to, &p.q, token, 0, query_head, bar);
        copy_tile(to + 4096, &p.k, token, 0, query_head, bar);
        copy_tile(to + 8192, &p.g, token, 0, w.head, bar);
    };
    if (warp == 0 && lane == 0)
        for (int slot = 0; slot < C::kSlots; slot++)
            if (first + slot * kStep < n) load_raw(first + slot * kStep, slot);
    float beta_ahead = warp == 0 && lane < 16 ? load_beta(p, w, first * kChunk + lane) : 0.f;

    const u32 own = warp * 2048 + lane * 4;  // this lane's word of row 0 in a bf16 tile
    for (int i = first; i < n; i += kStep) {
        const int turn = i / kStep, slot = turn % C::kSlots, stage_index = i % C::kStages;
        const u32 raw = raw_slot(slot), stage = shared + C::stages + stage_index * Stage::bytes;
        const u32 full = shared + C::full + 8 * stage_index, empty = shared + C::empty + 8 * stage_index;
        const int rows = min(kChunk, w.rows - i * kChunk);
        float beta = beta_ahead;
        if (warp == 0 && lane < 16) {
            beta_ahead = load_beta(p, w, (i + kStep) * kChunk + lane);
            if (p.flags & kBetaLogits) beta = sigmoid(beta) * p.beta_scale;
            if (lane >= rows) beta = 0.f;
        }
        barrier_wait(raw_barrier(slot), (turn / C::kSlots) & 1);

        if (rows < kChunk)  // rows past the end may hold anything, of another request or none
            for (int t = rows; t < kChunk; t++) {
                const u32 at = raw + t * 128 + (own ^ ((t & 7) << 4));
                store_shared(at, 0u);
                store_shared(at + 4096, 0u);
            }

        float decay[32];  // of this lane's two channels: fractions of the bound or log2 decays, then their prefix sums
        u32 keys[16];
        if constexpr (C::kGateFloat) {
            const u32 from = raw + 8192 + warp * 4096 + (lane >> 4) * 2048;
#pragma unroll
            for (int t = 0; t < 16; t++) {
                const Pair x = load_shared_pair(from + t * 128 + (((lane & 15) * 8) ^ ((t & 7) << 4)));
                decay[2 * t] = x.x;
                decay[2 * t + 1] = x.y;
            }
            __syncwarp();  // what this warp writes over g later lands where other lanes read
        } else {
#pragma unroll
            for (int t = 0; t < 16; t++) keys[t] = load_shared(raw + 8192 + t * 128 + (own ^ ((t & 7) << 4)));
#pragma unroll
            for (int t = 0; t < 16; t++) {
                decay[2 * t] = low_bf16(keys[t]);
                decay[2 * t + 1] = high_bf16(keys[t]);
            }
        }
        if constexpr (C::kBounded) {
#pragma unroll
            for (int t = 0; t < 16; t++) {
                decay[2 * t] = bounded_fraction(decay[2 * t], gate.bias0, gate.amplitude);
                decay[2 * t + 1] = bounded_fraction(decay[2 * t + 1], gate.bias1, gate.amplitude);
            }
        } else if (p.flags & kSoftplusGate) {
#pragma unroll
            for (int t = 0; t < 16; t++) {
                decay[2 * t] = softplus_log2_decay(decay[2 * t], gate.bias0, gate.amplitude);
                decay[2 * t + 1] = softplus_log2_decay(decay[2 * t + 1], gate.bias1, gate.amplitude);
            }
        } else {
#pragma unroll
            for (int t = 0; t < 32; t++) decay[t] = fmaxf(decay[t] * kLog2E, kMinLog2Decay);
        }
        if constexpr (C::kBounded) {
#pragma unroll
            for (int t = 0; t < 16; t++) keys[t] = load_shared(raw + 4096 + t * 128 + (own ^ ((t & 7) << 4)));
        }
        if (rows < kChunk) {
#pragma unroll
            for (int t = 0; t < 16; t++)
                if (t >= rows) decay[2 * t] = decay[2 * t + 1] = 0.f;
        }
        float sum0 = C::kBounded ? kShift : 0.f, sum1 = sum0;
#pragma unroll
        for (int t = 0; t < 16; t++) {
            sum0 = C::kBounded ? fmaf(decay[2 * t], gate.bound, sum0) : sum0 + decay[2 * t];
            sum1 = C::kBounded ? fmaf(decay[2 * t + 1], gate.bound, sum1) : sum1 + decay[2 * t + 1];
            decay[2 * t] = sum0;
            decay[2 * t + 1] = sum1;
        }

        barrier_wait(empty, ((i / C::kStages) & 1) ^ 1);
        if (warp == 0 && lane == 0) load_v<C>(p, w, stage, full, w.first_token + i * kChunk, rank);
        const float end0 = exp2_approx(sum0), end1 = exp2_approx(sum1);
        constexpr float unshift = C::kBounded ? kUnshift : 1.f;
        store_shared_pair(stage + Stage::decay + (lane & 3) * Stage::decay_row + (8 * warp + (lane >> 2)) * 8,
                          end0 * unshift, end1 * unshift);
        const u32 parts = raw + 8192;  // each warp's sums of products, over its half of g
        if constexpr (!C::kBounded) {
            const u32 tiles = stage + Stage::kd_qd + warp * 4096;  // until kd and qd take their place
            const u32 own_raw = raw + warp * 2048, own_parts = parts + warp * (C::kGateTile / 2);
            run_level<3>(own_parts, tiles, own_raw, lane, decay);
            run_level<2>(own_parts, tiles, own_raw, lane, decay);
            run_level<1>(own_parts, tiles, own_raw, lane, decay);
            run_level<0>(own_parts, tiles, own_raw, lane, decay);
        }
#pragma unroll
        for (int t = 0; t < 16; t++) {
            const u32 at = t * 128 + (own ^ ((t & 7) << 4)), wide = at + warp * 2048;  // kd|qd halves are 4096 apart
            const u32 query = load_shared(raw + at);
            const float g0 = decay[2 * t], g1 = decay[2 * t + 1];
            const float e0 = exp2_approx(g0), e1 = exp2_approx(g1);
            const u32 key = C::kBounded ? keys[t] : load_shared(raw + 4096 + at);
            const float k0 = low_bf16(key), k1 = high_bf16(key);
            store_shared(stage + Stage::kd_qd + wide, pack_bf16(k0 * e0, k1 * e1));
            if constexpr (C::kBounded) {
                const float i0 = k0 * exp2_approx(-g0), i1 = k1 * exp2_approx(-g1);
                // Over g, which this warp no longer needs: each warp stays within its own half.
                store_shared(raw + 8192 + at + warp * (C::kGateTile / 2 - 2048), pack_bf16(i0, i1));
                store_shared(stage + Stage::kr + at, pack_bf16(i0 * end0, i1 * end1));
            } else {
                store_shared(stage + Stage::kr + at, pack_bf16(k0 * exp2_approx(sum0 - g0), k1 * exp2_approx(sum1 - g1)));
            }
            store_shared(stage + Stage::kd_qd + 2048 + wide, pack_bf16(low_bf16(query) * e0, high_bf16(query) * e1));
        }
        if constexpr (C::kBounded) {
            named_barrier(id, 64);
            intra_bounded<C::kGateTile / 2>(raw, stage, scratch, warp, lane, rows, beta, l2norm, row_factor);
        } else {
            named_barrier(id, 64);
            intra_unbounded(parts, parts + C::kGateTile / 2, raw, stage, scratch, warp, lane, rows, beta, l2norm,
                            row_factor);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
        named_barrier(id, 64);
        if (warp == 0 && lane == 0) {
            if constexpr (C::kCluster) copy_to_peer(stage, rank ^ 1, Stage::prepared, full);
            if (i + kStep * C::kSlots < n) load_raw(i + kStep * C::kSlots, slot);
        }
    }
}
