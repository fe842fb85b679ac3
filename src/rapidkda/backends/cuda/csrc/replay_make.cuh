// The makers of replay.cu: from queries, keys, gates and records to the tables of a turn.
#pragma once
#include "replay_work.cuh"

constexpr int kOwn = kTokens >= 4 ? kTokens / kMakers : 1;  // tokens of a maker; with two tokens, two makers have none

// What a maker's lane reads of a turn from global memory, as it lies there.
struct Inputs {
    // Channels 4 lane to 4 lane + 3 of the maker's records to fold, zeros past their end, and of its tokens.
    Quad old_k[kOwn], old_g[kOwn];
    Words2 k[kOwn], q[kOwn];  // past the end, the last
    Words4 g[kOwn];
    u32 strength;  // of token lane, as bits
    Quad bias;
    float A_log;
};

DEVICE Words2 load_words(const u16* from, bool vectors) {
    if (vectors) return *reinterpret_cast<const Words2*>(from);
    return Words2{from[0] | static_cast<u32>(from[1]) << 16, from[2] | static_cast<u32>(from[3]) << 16};
}

DEVICE void load_tokens(const StepParams& p, Inputs& x, i64 first, int tokens, int head, int key_head, int maker,
                        int lane, bool vectors) {
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
        const i64 token = first + min(maker * kOwn + i, tokens - 1);
        x.k[i] = load_words(p.k + token * p.k_token_stride + key_head * p.k_head_stride + 4 * lane, vectors);
        x.q[i] = load_words(p.q + token * p.q_token_stride + key_head * p.q_head_stride + 4 * lane, vectors);
        const i64 g = token * p.g_token_stride + head * p.g_head_stride + 4 * lane;
        if (!(p.flags & kGateFloat)) {
            const Words2 two = load_words(static_cast<const u16*>(p.g) + g, vectors);
            x.g[i].x = two.x, x.g[i].y = two.y;
        } else if (vectors) {
            x.g[i] = *reinterpret_cast<const Words4*>(static_cast<const u32*>(p.g) + g);
        } else {
            const u32* from = static_cast<const u32*>(p.g) + g;
            x.g[i] = Words4{from[0], from[1], from[2], from[3]};
        }
    }
    const i64 beta = (first + min(lane & 7, tokens - 1)) * p.beta_token_stride + head * p.beta_head_stride;
    if (p.flags & kBetaFloat)
        x.strength = static_cast<const u32*>(p.beta)[beta];
    else
        x.strength = static_cast<const u16*>(p.beta)[beta];
    const bool aligned = (reinterpret_cast<u64>(p.dt_bias) & 15) == 0;
    x.bias = p.dt_bias ? load_four(p.dt_bias, head * 128 + 4 * lane, true, aligned) : Quad{0, 0, 0, 0};
    x.A_log = p.A_log ? p.A_log[head] : 0.f;
}

DEVICE void load_turn(const StepParams& p, Inputs& x, const Work& w, const Turn& t, int maker, int lane) {
    const float* old = p.records + w.slot * p.record_stride +
                       (t.record + maker * kOwn) * p.record_position_stride + w.head * kRecord + 4 * lane;
#pragma unroll
    for (int i = 0; i < kOwn; i++, old += p.record_position_stride) {
        const bool here = maker * kOwn + i < t.folds;
        x.old_k[i] = here ? load_four(old, 0, true, p.flags & kVectorRecords) : Quad{0, 0, 0, 0};
        x.old_g[i] = here ? load_four(old, 128, true, p.flags & kVectorRecords) : Quad{0, 0, 0, 0};
    }
    if (t.tokens == 0) return;
    const i64 first = w.tokens.first + t.token;
    if (p.flags & kVectorInputs)
        load_tokens(p, x, first, t.tokens, w.head, w.key_head, maker, lane, true);
    else
        load_tokens(p, x, first, t.tokens, w.head, w.key_head, maker, lane, false);
}

// Brings what a head's first turn reads besides its state into the L2 cache; `thread`: of all makers'.
DEVICE void prefetch_inputs(const StepParams& p, const Work& w, int thread) {
    if (w.slot < 0) return;
    const int record = thread / 12, line = thread % 12;  // 1,536 bytes
    if (record < min(w.accepted, kTokens))
        prefetch_line(p.records + w.slot * p.record_stride + record * p.record_position_stride + w.head * kRecord +
                      32 * line);
    const int token = thread / 16, part = thread % 16;  // two lines of q, of k and of v, then g
    if (token >= min(w.tokens.count, kTokens) || part >= (p.flags & kGateFloat ? 10 : 8)) return;
    const i64 at = w.tokens.first + token;
    const u16* line_at = p.q + at * p.q_token_stride + w.key_head * p.q_head_stride;
    if (part >= 2) line_at = p.k + at * p.k_token_stride + w.key_head * p.k_head_stride;
    if (part >= 4) line_at = p.v + at * p.v_token_stride + w.head * p.v_head_stride;
    if (part >= 6) {
        const i64 g = at * p.g_token_stride + w.head * p.g_head_stride;
        line_at = static_cast<const u16*>(p.g) + (p.flags & kGateFloat ? 2 * g : g);
    }
    prefetch_line(line_at + 64 * (part >= 6 ? part - 6 : part & 1));
}

DEVICE Quad widen(Words2 x) { return Quad{low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y)}; }

// The maker's tokens, activated: keys and log decays as records keep them. Leaves both and the queries in shared memory.
struct Activated {
    Quad k[kOwn], g[kOwn];
};
DEVICE void activate(const StepParams& p, Activated& own, const Inputs& x, int tokens, u32 rows, int maker, int lane) {
    Quad q[kOwn];
    float squares[2 * kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
        own.k[i] = widen(x.k[i]), q[i] = widen(x.q[i]);
        squares[i] = dot(own.k[i], own.k[i]), squares[kOwn + i] = dot(q[i], q[i]);
        own.g[i] = p.flags & kGateFloat ? Quad{__uint_as_float(x.g[i].x), __uint_as_float(x.g[i].y),
                                               __uint_as_float(x.g[i].z), __uint_as_float(x.g[i].w)}
                                        : widen(Words2{x.g[i].x, x.g[i].y});
    }
    log_decays<kOwn>(p, own.g, HeadGate{x.bias, gate_amplitude(x.A_log)});
    const float square = warp_sums<2 * kOwn>(squares, lane);
    const float scale = p.flags & kL2Norm ? inverse_sqrt(square + kNormEpsilon) : 1.f;
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
        own.k[i] = own.k[i] * __shfl_sync(kAllLanes, scale, 2 * i);
        q[i] = q[i] * (__shfl_sync(kAllLanes, scale, 2 * (kOwn + i)) * p.scale);
        const int token = maker * kOwn + i;
        const bool here = token < tokens;
        const Quad none{0, 0, 0, 0};
        if (token < kTokens) {
            const u32 to = rows + token * 512 + 16 * lane;
            store_shared_quad(to, here ? own.k[i] : none);
            store_shared_quad(to + kTokens * 512, here ? q[i] : none);
            store_shared_quad(to + 2 * kTokens * 512, natural_exp(own.g[i]));
        }
    }
}

// Where in a row of sums those of token `at` with key i lie: keys after i, then queries from i on; the last key first.
DEVICE constexpr int pair_place(int i, int at, bool query) {
    return (kTokens - 1 - i) * (kTokens - 1 - i) + (query ? kTokens - 1 - i + at - i : at - i - 1);
}
constexpr int kPairs = kTokens * kTokens;
constexpr int kBatch = kPairs < 16 ? kPairs : 16;  // sums that are taken at once

// A maker's 32 channels: x, keys and then queries, leaves decayed from the state to its token; the maker's share of the
// sums goes to shared memory, those of four makers side by side.
DEVICE void multiply_pairs(float* x, u32 rows, u32 shares, int maker, int lane) {
    float decay[kTokens], sums[kPairs];
    const u32 from = rows + 128 * maker + 4 * lane;
#pragma unroll
    for (int i = 0; i < 2 * kTokens; i++) x[i] = load_shared_float(from + i * 512);
#pragma unroll
    for (int i = 0; i < kTokens; i++) decay[i] = load_shared_float(from + (2 * kTokens + i) * 512);
#pragma unroll
    for (int i = kTokens - 1; i >= 0; i--) {
#pragma unroll
        for (int at = i; at < kTokens; at++) {
            if (at > i) sums[pair_place(i, at, false)] = x[at] * x[i];
            sums[pair_place(i, at, true)] = x[kTokens + at] * x[i];
        }
#pragma unroll
        for (int at = i; at < kTokens; at++) x[at] *= decay[i], x[kTokens + at] *= decay[i];
        const int so_far = (kTokens - i) * (kTokens - i), before = (kTokens - 1 - i) * (kTokens - 1 - i);
#pragma unroll
        for (int batch = before / kBatch; batch < so_far / kBatch; batch++) {
            const float sum = warp_sums<kBatch>(sums + batch * kBatch, lane);
            if (lane % 2 == 0 && lane < 2 * kBatch)
                store_shared_float(shares + (batch * kBatch + lane / 2) * 16 + 4 * maker, sum);
        }
    }
}

DEVICE void meet_makers() { named_barrier(1, kMakers * 32); }

// A channel of the records' keys, decayed to the last, and of the state's decay under them. Records that there are not
// are zeros and ones.
DEVICE void make_fold(u32 tables, u32 rows, int maker, int lane) {
    const int channel = 32 * maker + lane;
    const u32 from = rows + 3 * kTokens * 512 + 4 * channel;
    float keys[kTokens], total = 1.f;
#pragma unroll
    for (int i = kTokens - 1; i >= 0; i--) {
        keys[i] = load_shared_float(from + i * 512) * total;
        total *= load_shared_float(from + (kTokens + i) * 512);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 to = tables + kFold + i * kFoldPitch + 4 * kPair * channel, rest = to + kFoldRest - kFold;
        const float one = i < kTokens ? keys[i % kTokens] : 0.f;
        const u32 head = tf32(one);
        if (kPair == 2) {
            const float other = keys[(i + 4) % kTokens];
            const u32 other_head = tf32(other);
            store_shared_words2(to, head, other_head);
            store_shared_words2(rest, tf32_rest(one, head), tf32_rest(other, other_head));
        } else {
            store_shared(to, head);
            store_shared(rest, tf32_rest(one, head));
        }
    }
    store_shared_float(tables + kDecay + 4 * channel, total);
}

// M and W from the sums, by one maker; lane l has column l % 8. strength: of token lane.
DEVICE void solve(u32 shares, float strength, u32 mix, int lane) {
    float pairs[(kPairs + 31) / 32], m[kTokens];
#pragma unroll
    for (int i = 0; i < (kPairs + 31) / 32; i++) {
        const Quad share = load_shared_quad(shares + (32 * i + (kPairs < 32 ? lane % kPairs : lane)) * 16);
        pairs[i] = (share.x + share.y) + (share.z + share.w);
    }
    auto pair = [&](int i, int at, bool query) -> float {
        const int place = pair_place(i, at, query);
        return __shfl_sync(kAllLanes, pairs[place / 32], place % 32);
    };
    const int mine = lane & 7;
    auto keep = [&](int row, float x) {
        const u32 head = tf32(x);
        if (lane < 8) {
            store_shared(mix + (row * 8 + lane) * 4, head);
            store_shared(mix + kMixRest - kMix + (row * 8 + lane) * 4, tf32_rest(x, head));
        }
    };
#pragma unroll
    for (int i = 0; i < kTokens; i++) {
        float sum = mine == i ? 1.f : 0.f;
#pragma unroll
        for (int j = 0; j < i; j++) sum = fmaf(-pair(j, i, false), m[j], sum);
        m[i] = sum * __shfl_sync(kAllLanes, strength, i);
        keep(i, m[i]);
    }
#pragma unroll
    for (int i = 0; i < kTokens; i++) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j <= i; j++) sum = fmaf(pair(j, i, true), m[j], sum);
        keep(kTokens + i, sum);
    }
}

DEVICE void make(const StepParams& p, u32 shared, int maker, int lane) {
    const u32 rows = shared + kTokenRows, shares = shared + kShares;
    Walk walk = begin_walk(p);
    Work work = next_work(p, walk);
    Inputs inputs{};
    if (work.slot >= 0) load_turn(p, inputs, work, find_turn(work.accepted, work.tokens.count, 0), maker, lane);
    Work next = next_work(p, walk);
    prefetch_inputs(p, next, 32 * maker + lane);
    int set = 0, free_parity = 1, solver = 0;
    while (work.slot >= 0) {
        const int turns = count_turns(work.accepted, work.tokens.count);
        const Work after = next;
        for (int index = 0; index < turns; index++) {
            const Turn turn = find_turn(work.accepted, work.tokens.count, index);
            if (index > 0) load_turn(p, inputs, work, turn, maker, lane);
            if (turn.folds > 0 && maker * kOwn < kTokens) {
#pragma unroll
                for (int i = 0; i < kOwn; i++) {
                    const u32 to = rows + (3 * kTokens + maker * kOwn + i) * 512 + 16 * lane;
                    store_shared_quad(to, inputs.old_k[i]);
                    store_shared_quad(to + kTokens * 512, natural_exp(inputs.old_g[i]));
                }
            }
            float strength = __uint_as_float(p.flags & kBetaFloat ? inputs.strength : inputs.strength << 16);
            if (p.flags & kBetaLogits) strength = sigmoid(strength) * p.beta_scale;
            Activated own;
            if (turn.tokens > 0) activate(p, own, inputs, turn.tokens, rows, maker, lane);
            if (index == turns - 1 && next.slot >= 0) {
                load_turn(p, inputs, next, find_turn(next.accepted, next.tokens.count, 0), maker, lane);
                next = next_work(p, walk);
                prefetch_inputs(p, next, 32 * maker + lane);
            }
            meet_makers();  // all tokens are there, and all old records have been read

            float x[2 * kTokens];
            if (turn.tokens > 0) {
                float* const to = p.records + work.slot * p.record_stride + turn.token * p.record_position_stride +
                                  work.head * kRecord + 4 * lane;
#pragma unroll
                for (int i = 0; i < kOwn; i++) {
                    const int token = maker * kOwn + i;
                    if (token >= turn.tokens) continue;
                    store_four(to, token * p.record_position_stride, own.k[i], p.flags & kVectorRecords);
                    store_four(to, token * p.record_position_stride + 128, own.g[i], p.flags & kVectorRecords);
                }
                multiply_pairs(x, rows, shares, maker, lane);
            }
            const u32 tables = shared + kTables + set * kSetBytes;
            barrier_wait(shared + kUsed + 8 * set, free_parity);
            if (turn.folds > 0) make_fold(tables, rows, maker, lane);
            if (turn.tokens > 0) {
                const u32 to = tables + kOperands + 128 * maker + 4 * lane;
#pragma unroll
                for (int i = 0; i < 2 * kTokens; i++) {
                    const u32 head = tf32(x[i]);
                    store_shared(to + i * kOperandPitch, head);
                    store_shared(to + i * kOperandPitch + kOperandsRest - kOperands, tf32_rest(x[i], head));
                }
            }
            meet_makers();  // all shares of sums are there, and new records for the turn after this
            if (turn.tokens > 0 && maker == solver)
                solve(shares, lane < turn.tokens ? strength : 0.f, tables + kMix, lane);
            solver = solver + 1 == kMakers ? 0 : solver + 1;
            __syncwarp();
            if (arrives(lane)) barrier_arrive(shared + kMade + 8 * set);
            set = set + 1 == kSets ? 0 : set + 1;
            free_parity ^= set == 0;
        }
        work = after;
    }
}
