// The producers: from raw q, k, g, beta of a chunk to everything the recurrence needs of it (layout.cuh, Stage).
//
// Group i of two warps takes every kGroups-th chunk of this CTA. Warp w owns channels 64 w .. 64 w + 63, a lane four
// neighbouring ones over 8 of the 16 tokens: prefix sums are its own. Raw tiles arrive by TMA in a ring of slots that
// the groups share. The two warps take turns as the solver, which has the longer second half of a chunk: the other one
// goes ahead. Chunks count from the kernel's start over all runs of the CTA, so producers go on to the next run while
// the consumers finish this one: chunk `base + i` is the i-th of this run.
//
// Barriers. `raw_full[slot]`, or two of them in turn: the raw tiles landed (the copy's bytes). `empty[stage]`: every
// consumer warp, of both CTAs of a cluster, is done with the stage; of a cluster's, the CTA that fills the stage is
// told. `full[stage]`: this group's two warps arrived and V's bytes landed; where the peer prepares the chunk, the
// bytes of its copy and of V. Named barriers of a group: `exchange` between what the warps give and take of their
// products, `inverse_read` before what the solver takes is written over, `chunk_done` before, in a cluster, the stage
// is copied.
#pragma once
#include "convolution.cuh"
#include "epilogue.cuh"
#include "gate.cuh"
#include "products.cuh"
#include "row_scale.cuh"
#include "state.cuh"
#include "work.cuh"

template <Form kForm, bool kBounded, bool kGateFloat, bool kParts, bool kConvolves = false, bool kNorms = false>
struct PrefillConfig : Config<kForm, kBounded, kGateFloat, kParts, kConvolves, kNorms> {
    using Gate = typename Select<kBounded, BoundedGate, UnboundedGate>::Type;
    using InRegisters = typename Select<PrefillConfig::kDecaysInTurns, DecaysInTurns, DecaysInRegisters>::Type;
    using Decays = typename Select<PrefillConfig::kDecaysInShared, DecaysInShared, InRegisters>::Type;
};

// Bytes of V that the CTA `rank` needs of a chunk.
template <class C>
DEVICE int v_bytes(u32 rank) {
    return C::kForm == Form::kWhole ? 4096 : C::kForm == Form::kPair ? 2048 : rank == 0 ? 4096 : 0;
}

// Announce and start the loads of V, for this CTA and, in a cluster, on the peer's behalf. One thread. strong: low parts
// of keys will follow.
template <class C>
DEVICE void load_v(const Params& p, int head, u32 stage, u32 full, int token, u32 rank, bool strong) {
    const u32 v = stage + Stage::v, peer = rank ^ 1;
    barrier_expect(full, v_bytes<C>(rank));
    if constexpr (C::kCluster)
        barrier_expect_remote(full, peer, Stage::prepared + (strong ? C::kLowKeyBytes : 0) + v_bytes<C>(peer));
    if constexpr (C::kForm == Form::kWhole) {
        copy_tile(v, &p.v, token, 0, head, full);
        copy_tile(v + 2048, &p.v, token, 1, head, full);
    } else if constexpr (C::kForm == Form::kPair) {
        copy_tile(v, &p.v, token, rank, head, full);
        copy_tile_remote(v, &p.v, token, peer, head, full, peer);
    } else if (rank == 0) {
        copy_tile(v, &p.v, token, 0, head, full);
        copy_tile(v + 2048, &p.v, token, 1, head, full);
    } else {
        copy_tile_remote(v, &p.v, token, 0, head, full, peer);
        copy_tile_remote(v + 2048, &p.v, token, 1, head, full, peer);
    }
}

// Into L2, well before the copies: a slot is filled less than a round of the groups before it is needed.
DEVICE void prefetch_chunk(const Params& p, int token, int query_head, int head) {
    prefetch_tile(&p.q, token, 0, query_head);
    prefetch_tile(&p.k, token, 0, query_head);
    prefetch_tile(&p.g, token, 0, head);
    prefetch_tile(&p.v, token, 0, head);
    prefetch_tile(&p.v, token, 1, head);
}

// Until the consumers of both CTAs are done with the stage of this group, and so with all that it copied to the peer: this
// CTA must not leave before. `end`: chunks of all runs.
template <class C>
DEVICE void drain_stage(u32 shared, int warp_index, u32 rank, int end) {
    static_assert(C::kStages == 2 * C::kGroups);
    const int stage = (warp_index >> 1) * 2 + rank, round = (end + C::kStages - 1 - stage) / C::kStages;
    barrier_wait(shared + C::empty + 8 * stage, (round & 1) ^ 1);
}

// Beta is asked for, to be decoded when it is needed: the copy has a chunk's time to arrive, where a load would hold up
// whatever shares its scoreboard. It takes the aligned word around the element, which may be its upper half.
struct BetaRows {
    u64 first, stride;  // address of the first row, bytes from row to row
};
DEVICE BetaRows beta_rows(const Params& p, const Work& w) {
    const u32 shift = p.flags & kBetaFloat ? 2 : 1;
    const i64 at = static_cast<i64>(w.first_token) * p.beta_token_stride + w.head * p.beta_head_stride;
    return BetaRows{reinterpret_cast<u64>(p.beta) + static_cast<u64>(at << shift),
                    static_cast<u64>(p.beta_token_stride << shift)};
}
DEVICE float decode_beta(const Params& p, u32 word, bool upper) {
    const float x = __uint_as_float(upper ? word & 0xffff0000u : p.flags & kBetaFloat ? word : word << 16);
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

// Gate logits of this lane's channels, [token][4], from this warp's half of their tile. word: of the first token.
DEVICE void load_logits(float* logits, u32 tile, u32 word, int tokens) {
    Words2 words[8];
#pragma unroll
    for (int t = 0; t < tokens; t++) words[t] = load_shared_words2(tile + row_word(word, t));
#pragma unroll
    for (int t = 0; t < tokens; t++) {
        logits[4 * t] = low_bf16(words[t].x);
        logits[4 * t + 1] = high_bf16(words[t].x);
        logits[4 * t + 2] = low_bf16(words[t].y);
        logits[4 * t + 3] = high_bf16(words[t].y);
    }
}
DEVICE void load_float_logits(float* logits, u32 tile, int lane) {
    const u32 word = (lane >> 4) * 1024 + (lane & 7) * 16, from = tile + ((lane >> 3) & 1) * 2048;
#pragma unroll
    for (int t = 0; t < 8; t++) {
        const Quad x = load_shared_quad(from + row_word(word, t));
        logits[4 * t] = x.x;
        logits[4 * t + 1] = x.y;
        logits[4 * t + 2] = x.z;
        logits[4 * t + 3] = x.w;
    }
    __syncwarp();  // what this warp writes over g later lands where other lanes read
}

// In place: log2 decays, summed on from `before`, or from nothing.
template <class C, int kCount>
DEVICE void accumulate_decays(float (&x)[kCount], const float* before, const GateChannels& gate, bool raw_gate) {
    if constexpr (C::kBounded) {
#pragma unroll
        for (int t = 0; t < kCount; t++) x[t] = bounded_fraction(x[t], gate.bias[t & 3], gate.amplitude);
    } else if (raw_gate) {
#pragma unroll
        for (int t = 0; t < kCount; t++) x[t] = softplus_strength(x[t], gate.bias[t & 3], gate.bound);
    } else {
#pragma unroll
        for (int t = 0; t < kCount; t++) x[t] = log_decay_strength(x[t], gate.bound);
    }
    const float factor = C::kBounded ? gate.bound : gate.amplitude;
#pragma unroll
    for (int t = 0; t < kCount; t++)
        x[t] = t >= 4 ? fmaf(x[t], factor, x[t - 4]) : before ? fmaf(x[t], factor, before[t]) : x[t] * factor;
}

// From gates in this warp's half of their tile.
template <class C>
DEVICE void make_decays(DecaysInRegisters& decays, u32 gates, int lane, const GateChannels& gate, bool raw_gate) {
    if constexpr (C::kGateFloat)
        load_float_logits(decays.x, gates, lane);
    else
        load_logits(decays.x, gates, lane_word(lane), 8);
    accumulate_decays<C>(decays.x, nullptr, gate, raw_gate);
}
template <class C>
DEVICE void make_decays(DecaysInTurns& decays, u32 gates, int lane, const GateChannels& gate, bool raw_gate) {
#pragma unroll
    for (int c = 0; c < 4; c++) decays.x[28 + c] = 0.f;
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
        float x[16];
        load_logits(x, gates, turn_word(lane, turn), 4);
        accumulate_decays<C>(x, decays.x + 28, gate, raw_gate);
#pragma unroll
        for (int t = 0; t < 16; t++) {
            decays.x[t] = decays.x[16 + t];
            decays.x[16 + t] = x[t];
        }
    }
}
template <class C>
DEVICE void make_decays(DecaysInShared& decays, u32 gates, int lane, const GateChannels& gate, bool raw_gate) {
    constexpr int kTokens = DecaysInShared::tokens;
#pragma unroll 1
    for (int turn = 0; turn < DecaysInShared::turns; turn++) {
        const u32 word = turn_word(lane, turn);
        float x[4 * kTokens];
        load_logits(x, gates, word, kTokens);
        accumulate_decays<C>(x, decays.sum, gate, raw_gate);
#pragma unroll
        for (int c = 0; c < 4; c++) decays.sum[c] = x[4 * kTokens - 4 + c];
#pragma unroll
        for (int t = 0; t < kTokens; t++) decays.put(word, t, x + 4 * t);
    }
}

// Raw q, k and g of a chunk. One thread, or those that arrive.
template <class C>
DEVICE void load_raw_tiles(const Params& p, u32 to, u32 bar, int token, int query_head, int head, int lane) {
    if (lane != 0) return barrier_arrive(bar);
    barrier_expect(bar, C::kRawBytes);
    copy_tile(to, &p.q, token, 0, query_head, bar);
    copy_tile(to + 4096, &p.k, token, 0, query_head, bar);
    copy_tile(to + 8192, &p.g, token, 0, head, bar);
}

template <class C>
DEVICE void prepare_chunks(const Params& p, const Work& w, u32 shared, int warp_index, int this_lane, u32 rank, int n,
                           int base, const Neighbours& b, Output& output) {
    const int group = warp_index >> 1, warp = warp_index & 1;
    // In registers, but for a convolution, which leaves none.
    const Work copy = w;
    const Work& run = C::kConvolves ? w : copy;
    const int query_head = run.head / p.group;
    constexpr int kCtas = C::kCluster ? 2 : 1, kStep = C::kGroups * kCtas;  // chunks between two of this group
    const int first = ((C::kCluster ? 2 * group + rank : group) + kStep - base % kStep) % kStep;
    const u32 scratch = shared + C::scratch + group * C::kScratch;
    // Named barriers of this group.
    const int exchange = 1 + group;
    const Handover chunk_done{1 + C::kGroups + group, shared + C::handovers + 8 * group};
    const Handover inverse_read{1 + 2 * C::kGroups + group, shared + C::handovers + 8 * (C::kGroups + group)};

    constexpr int kAhead = C::kSlots * kCtas;  // chunks between two of a slot
    auto load_raw = [&](int i, int landing, int lane) {  // one thread, or those that arrive
        const int token = run.first_token + i * kChunk;
        const u32 to = shared + C::raw + C::slot_of(landing) * C::kRaw, bar = shared + C::raw_full + 8 * landing;
        load_raw_tiles<C>(p, to, bar, token, query_head, run.head, lane);
        if (lane != 0) return;
        if constexpr (C::kConvolves) load_before<C>(p, b, to, token, query_head, run.head, bar);
        if constexpr (C::kDecaysInShared)
            if (i + kAhead < n) prefetch_chunk(p, token + kAhead * kChunk, query_head, run.head);
    };
    auto load_first = [&](int from, int to) {  // into the slots that this group was the last to use
        if (warp == 0 && arrives(this_lane))
#pragma unroll 1
            for (int i = from + (base + rank) % kCtas; i < min(n, to); i += kCtas)
                if (((base + i) / kCtas + C::kSlots * (C::kGroups - 1)) % C::kGroups == group)
                    load_raw(i, (base + i) / kCtas % C::kRawBarriers, this_lane);
    };
    // All CTAs begin at once, so what the first chunks need is asked for first: a tile of each group, write strengths, V
    // where its stage has never been used, and only then the rest.
    constexpr bool kValuesFirst = C::kForm == Form::kWhole && !C::kConvolves;
    meet(exchange, 64);  // both warps have left the raw tiles of the run before
    if (!(C::kParts && C::kForm == Form::kWhole && base == 0)) load_first(0, kStep);  // a share's: prefill.cu
    // Write strengths, of token `lane`. A warp looks after those of the chunks that it solves: behind its products of the
    // chunk before the last of its own it asks for them, and ahead of its products of the last it decodes them in place
    // and tells the other warp which of them are strong.
    auto beta_of = [&](int turn) { return scratch + Scratch::beta + (turn & 3) * 4; };
    auto strong_of = [&](int turn) { return scratch + Scratch::strong + (turn & 3) * 4; };
    const BetaRows beta_words = beta_rows(p, w);
    const u64 own_beta = beta_words.first + this_lane * beta_words.stride;  // in the run's first chunk
    const bool upper = own_beta & 2;                                        // and in any other
    auto ask_for_beta = [&](int i, int turn, int lane) {
        if (lane < min(kChunk, run.rows - i * kChunk))
            copy_word(beta_of(turn) + lane * Scratch::lower_row, (own_beta & ~3ull) + (i * kChunk) * beta_words.stride);
    };
    auto take_beta = [&](int i, int turn, int lane) {
        const u32 at = beta_of(turn) + lane * Scratch::lower_row;
        copy_words_wait();
        float beta = 0.f;
        if (lane < min(kChunk, run.rows - i * kChunk)) beta = decode_beta(p, load_shared(at), upper);
        if (lane < kChunk) store_shared_float(at, beta);
        const u32 strong = __ballot_sync(kAllLanes, beta > Exact::kStrong);
        if (lane == 0) store_shared(strong_of(turn), strong);
    };
    // Of this warp's first chunk, and of the second one where the other warp solves the first.
    const int first_turn = (base + first) / kStep, later = (first_turn & 1) != warp;
    ask_for_beta(first + later * kStep, first_turn + later, this_lane);
    if (!later) ask_for_beta(first + 2 * kStep, first_turn + 2, this_lane);
    if (kValuesFirst && base + first < C::kGroups && first < n && warp == 0 && this_lane == 0)
        load_v<C>(p, run.head, shared + C::stages + (base + first) * C::kStageBytes, shared + C::full + 8 * (base + first),
                  run.first_token + first * kChunk, rank, false);
    const GateChannels gate = gate_channels(p, run.head, 64 * warp + 4 * (this_lane & 15), C::kBounded);
    // The consumers will want it when they come here; at the start they do so at once, but for a share's.
    if (w.has_initial && (base > 0 || (C::kParts && C::kForm == Form::kWhole)))
        prefetch_state(p.initial, w.read_slot * p.initial_stride + static_cast<i64>(run.head) * (128 * 128),
                       p.flags & kInitialFloat, warp_index * 32 + this_lane, C::kGroups * 64);
    take_beta(first + later * kStep, first_turn + later, this_lane);
    meet(exchange, 64);
    if constexpr (kStep < kAhead) load_first(kStep, kAhead);

    const u32 half = warp * 2048;  // this warp's half of a bf16 tile
    using Gate = typename C::Gate;
    for (int i = first; i < n; i += kStep) {
        const int lane = fresh_lane();
        const int turn = (base + i) / kStep, load = (base + i) / kCtas, landing = load % C::kRawBarriers;
        const int stage_index = (base + i) % C::kStages;
        const bool solver = warp == (turn & 1);
        const u32 raw = shared + C::raw + C::slot_of(landing) * C::kRaw;
        const u32 stage = shared + C::stages + stage_index * C::kStageBytes;
        const u32 full = shared + C::full + 8 * stage_index, empty = shared + C::empty + 8 * stage_index;
        const u32 scales = scratch + Scratch::scales + (turn & 1) * Scratch::scales_bytes;
        const int rows = min(kChunk, run.rows - i * kChunk);
        barrier_wait(shared + C::raw_full + 8 * landing, (load / C::kRawBarriers) & 1);
        if constexpr (C::kConvolves) {
            if (i == 0 && w.first_chunk == 0) write_history<C>(p, b, w, raw, query_head, warp, lane);
            convolve_chunk<C>(p, b, raw, query_head, run.head, warp, lane);
            __syncwarp();
        }
        if (rows < kChunk) blank_rows<C>(raw, warp, lane, rows, p.flags & kRawGate);
        // Each warp writes its half of the channels, and scales need both.
        if (C::kConvolves || rows < kChunk) meet(exchange, 64);
        const bool l2norm = p.flags & kL2Norm;
        if (solver) write_row_scales(scales + 64, raw, lane, rows, l2norm, p.scale);

        auto wait_for_inverse = [&]() {  // until the last solver has read it
            if (C::kEarlyReload && solver && i != first) inverse_read.wait(turn - 1);
        };
        typename C::Decays decays;
        if constexpr (C::kDecaysInShared) {
            wait_for_inverse();
            decays = DecaysInShared{raw + 8192 + half, shared + C::inverse + group * 4096 + half, {0.f, 0.f, 0.f, 0.f}};
        }
        make_decays<C>(decays, raw + 8192 + warp * (C::kGateTile / 2), lane, gate, p.flags & kRawGate);
        Anchors anchors;  // before the wait, unless decays already take the registers
        if constexpr (C::kDecaysInShared) anchors = find_anchors<Gate>(decays.total(), lane);
        const u32 strong = load_shared(strong_of(turn));  // bits of tokens
        if (solver) take_beta(i + 2 * kStep, turn + 2, lane);

        barrier_wait(empty, (((base + i) / C::kStages) & 1) ^ 1);
        if constexpr (C::kNorms) {
            norm_output<C>(p, b, shared, group, warp, lane, output);  // of the chunk that was in this stage
            fence_async_proxy();
            meet(exchange, 64);
            if (lane == 0) output = Output{run.first_token + i * kChunk, rows, run.head, turn};
            if (solver && lane == 0) load_z<C>(b, shared, group, run.first_token + i * kChunk, run.head);
        }
        if constexpr (C::kConvolves)
            hand_values_over<C>(raw, stage, full, rank, warp, lane, solver);
        else if (solver && lane == 0 && !(kValuesFirst && base + i < C::kGroups))
            load_v<C>(p, run.head, stage, full, run.first_token + i * kChunk, rank, strong);
        __syncwarp();  // the scales are written by other lanes
        if (solver && lane < kChunk) {
            const u32 to = stage + Stage::decay + (lane >> 2) * Stage::lane_row + (lane & 3) * 4;
            store_shared_float(to + Stage::query_scale, load_shared_float(scales + 64 + lane * 4) * Gate::rows_unshift);
            store_shared(to + Stage::exact, 0);  // no marks, unless the solver finds some
        }
        const u32 inverse = C::kEarlyReload ? shared + C::inverse + group * 4096 : raw + 8192;
        const u32 own_inverse = inverse + warp * (C::kGateTile / 2);
        const u32 own_kd = stage + Stage::tiles + warp * Stage::half;
        if constexpr (!C::kDecaysInShared) {
            wait_for_inverse();
            anchors = find_anchors<Gate>(decays.total(), lane);
        }
        constexpr bool kTakenOnce = C::kDecaysInShared || C::kDecaysInTurns;
        if (kTakenOnce && C::kLowKeys && rarely(strong))  // before the decays are written over
            write_low_keys(decays, anchors, raw + 4096 + half, stage + C::low_keys, warp, lane);
        write_decayed(decays, anchors, raw + half, raw + 4096 + half, own_inverse, own_kd, lane);
        if (!kTakenOnce && C::kLowKeys && strong)  // rare
            write_low_keys(decays, anchors, raw + 4096 + half, stage + C::low_keys, warp, lane);
        const int pair = 32 * warp + 2 * (lane & 15) + (lane >> 4);
        store_shared_pair(stage + Stage::decay + (pair & 3) * Stage::lane_row + (pair >> 2) * 8, anchors.end[0],
                          anchors.end[1]);
        // A named barrier may not be left half arrived at, an mbarrier must not miss a turn.
        const bool tells = !C::kEarlyReload || KDA_EVERY_LANE_ARRIVES || i + kStep < n;
        const u32 factors = stage + Stage::inverse + warp * 256;  // free until the solver's end
        if constexpr (Gate::anchors == 2)
            store_shared_words2(factors + lane * 8, anchors.factors[0], anchors.factors[1]);
        __syncwarp();
        const Products products = multiply_own<Gate>(own_inverse, own_kd, factors, lane);
        if constexpr (C::kDecaysInShared) fence_async_proxy();  // written over g, where the next copy goes
        combine<Gate>(products, own_inverse, inverse + (warp ^ 1) * (C::kGateTile / 2), stage, scratch, scales, solver,
                      lane, beta_of(turn), rows, l2norm, exchange, inverse_read, tells, strong, C::kLowKeys);
        if (!C::kEarlyReload && !solver) inverse_read.wait(turn);
        auto reload = [&]() {
            if (arrives(lane) && i + kAhead < n) load_raw(i + kAhead, C::next_of(landing), lane);
        };
        if (C::kEarlyReload && !solver) reload();
        fence_async_proxy();
        __syncwarp();
        if (arrives(lane)) barrier_arrive(full);
        if (!solver) {
            if (!C::kEarlyReload) reload();
            ask_for_beta(i + 3 * kStep, turn + 3, lane);
            if constexpr (C::kCluster) chunk_done.arrive();
        } else if constexpr (C::kCluster) {
            chunk_done.wait(turn);
            if (lane == 0) {
                copy_to_peer(stage, rank ^ 1, Stage::prepared, full);
                if (C::kLowKeys && strong) copy_to_peer(stage + C::low_keys, rank ^ 1, C::kLowKeyBytes, full);
            }
        }
    }
}
