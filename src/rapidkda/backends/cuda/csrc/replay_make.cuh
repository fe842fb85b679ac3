// The makers of replay.cu: from queries, keys, gates and records to the tables of a turn.
//
// Of eight makers each activates a token and then takes 16 channels of all tokens: half of its lanes the keys, half the
// queries.
#pragma once
#include "replay_work.cuh"

DEVICE Words2 load_words(const u16* from) {
    return Words2{from[0] | static_cast<u32>(from[1]) << 16, from[2] | static_cast<u32>(from[3]) << 16};
}

// Asks for what a lane needs of a maker's token: four channels, into shared memory. No register waits for them.
DEVICE void ask_token(const StepParams& p, u32 to, const Work& w, const Turn& t, int maker, int lane) {
    if (maker >= kTokens || t.tokens == 0) return;
    const i64 token = w.tokens.first + t.token + min(maker, t.tokens - 1);
    const int head = key_head(p, w.head);
    const u16* const k = p.k + token * p.k_token_stride + head * p.k_head_stride + 4 * lane;
    const u16* const q = p.q + token * p.q_token_stride + head * p.q_head_stride + 4 * lane;
    const i64 g = token * p.g_token_stride + w.head * p.g_head_stride + 4 * lane;
    const u32 at = to + maker * kAskedBytes + 8 * lane, g_at = at + kAskedG;
    if (p.flags & kVectorInputs) {
        copy_8(at, k), copy_8(at + kAskedQ, q);
        if (p.flags & kGateFloat)
            copy_16(g_at + 8 * lane, static_cast<const u32*>(p.g) + g);
        else
            copy_8(g_at, static_cast<const u16*>(p.g) + g);
        return;
    }
    const Words2 k_words = load_words(k), q_words = load_words(q);
    store_shared_words2(at, k_words.x, k_words.y);
    store_shared_words2(at + kAskedQ, q_words.x, q_words.y);
    if (p.flags & kGateFloat) {
        const u32* const from = static_cast<const u32*>(p.g) + g;
        store_shared_words4(g_at + 8 * lane, Words4{from[0], from[1], from[2], from[3]});
    } else {
        const Words2 words = load_words(static_cast<const u16*>(p.g) + g);
        store_shared_words2(g_at, words.x, words.y);
    }
}
// The same of a head's gate, by one maker for all.
DEVICE void ask_gate(const StepParams& p, u32 to, int head, int lane) {
    if (p.dt_bias && (reinterpret_cast<u64>(p.dt_bias) & 15) == 0)
        copy_16(to + 16 * lane, p.dt_bias + head * 128 + 4 * lane);
    else
        store_shared_quad(to + 16 * lane, p.dt_bias ? load_four(p.dt_bias, head * 128 + 4 * lane, true, false) : Quad{});
    if (lane == 0) store_shared_float(to + 512, p.A_log ? p.A_log[head] : 0.f);
}

// A channel of half of the records that a turn applies; zeros past their end.
constexpr int kOwnFolds = kFolds / 2;
struct Old {
    float k[kOwnFolds], g[kOwnFolds];
};
DEVICE void load_records(const StepParams& p, Old& old, const Work& w, const Turn& t, int channel, int half) {
    const int first = half * kOwnFolds;
    const float* from = p.records + w.slot * p.record_stride + (t.record + first) * p.record_position_stride +
                        w.head * kRecord + channel;
#pragma unroll
    for (int i = 0; i < kOwnFolds; i++, from += p.record_position_stride) {
        old.k[i] = first + i < t.folds ? from[0] : 0.f;
        old.g[i] = first + i < t.folds ? from[128] : 0.f;
    }
}

// Brings what a head's first turn reads besides its state into the L2 cache; `thread`: of all makers'.
DEVICE void prefetch_records(const StepParams& p, const Work& w, int thread) {
    if (w.slot < 0) return;
    const int records = min(w.taken, kFolds);
    for (int at = thread; at < 12 * records; at += 32 * kMakers)  // lines; 1,536 bytes a record
        prefetch_line(p.records + w.slot * p.record_stride + at / 12 * p.record_position_stride + w.head * kRecord +
                      32 * (at % 12));
}
DEVICE void prefetch_tokens(const StepParams& p, const Work& w, int thread) {
    const int token = thread / 16, part = thread % 16;  // two lines of q, of k and of v, then g
    if (w.slot < 0 || token >= min(w.tokens.count, kTokens) || part >= (p.flags & kGateFloat ? 10 : 8)) return;
    const i64 at = w.tokens.first + token;
    const u16* line_at = p.q + at * p.q_token_stride + key_head(p, w.head) * p.q_head_stride;
    if (part >= 2) line_at = p.k + at * p.k_token_stride + key_head(p, w.head) * p.k_head_stride;
    if (part >= 4) line_at = p.v + at * p.v_token_stride + w.head * p.v_head_stride;
    if (part >= 6) {
        const i64 g = at * p.g_token_stride + w.head * p.g_head_stride;
        line_at = static_cast<const u16*>(p.g) + (p.flags & kGateFloat ? 2 * g : g);
    }
    prefetch_line(line_at + 64 * (part >= 6 ? part - 6 : part & 1));
}

DEVICE Quad widen(Words2 x) { return Quad{low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y)}; }

// The maker's token, activated: key and log decay as records keep them. Leaves both and the query in shared memory.
struct Activated {
    Quad k, g;
};
DEVICE Activated activate(const StepParams& p, u32 asked, u32 gate, int tokens, u32 rows, int maker, int lane) {
    const u32 from = asked + maker * kAskedBytes + 8 * lane;
    Activated own;
    own.k = widen(load_shared_words2(from));
    Quad q = widen(load_shared_words2(from + kAskedQ));
    own.g = p.flags & kGateFloat ? load_shared_quad(from + kAskedG + 8 * lane)
                                 : widen(load_shared_words2(from + kAskedG));
    float squares[2] = {dot(own.k, own.k), dot(q, q)};
    const float amplitude = gate_amplitude(load_shared_float(gate + 512));
    log_decays<1>(p, &own.g, HeadGate{load_shared_quad(gate + 16 * lane), amplitude});
    const float square = warp_sums<2>(squares, lane);
    const float scale = p.flags & kL2Norm ? inverse_sqrt(square + kNormEpsilon) : 1.f;
    own.k = own.k * __shfl_sync(kAllLanes, scale, 0);
    q = q * (__shfl_sync(kAllLanes, scale, 2) * p.scale);
    const bool here = maker < tokens;
    const Quad none{0, 0, 0, 0};
    const u32 to = rows + maker * kRowPitch + 16 * lane;
    store_shared_quad(to, here ? own.k : none);
    store_shared_quad(to + kTokens * kRowPitch, here ? q : none);
    store_shared_quad(to + 2 * kTokens * kRowPitch, natural_exp(own.g));
    return own;
}

// A channel of a turn's tokens: x, keys or queries.
struct Channel {
    float x[kTokens], key[kTokens], decay[kTokens];
};
DEVICE Channel load_channel(u32 rows, int channel, int half) {
    Channel t;
    const u32 from = rows + 4 * channel;
#pragma unroll
    for (int i = 0; i < kTokens; i++) {
        t.x[i] = load_shared_float(from + (half * kTokens + i) * kRowPitch);
        t.key[i] = load_shared_float(from + i * kRowPitch);
        t.decay[i] = load_shared_float(from + (2 * kTokens + i) * kRowPitch);
    }
    return t;
}
// Decays tokens from i on by what lies between them and the token before i.
DEVICE void decay_from(float* x, const Channel& t, int i) {
#pragma unroll
    for (int at = i; at < kTokens; at++) x[at] *= t.decay[i];
}

// Where in a row of sums that of token `at` with key i lies; the last key first.
DEVICE constexpr int pair_place(int i, int at) { return (kTokens - 1 - i) * (kTokens - i) / 2 + at - i; }
constexpr int kBatch = kPairs < 8 ? 4 : 8;  // sums that are taken at once

// Sums over a maker's channels go to shared memory, those of all makers side by side. Consumes x.
DEVICE void multiply_pairs(Channel& t, u32 shares, int maker, int lane, int half) {
    float sums[(kPairs + kBatch - 1) / kBatch * kBatch] = {};
#pragma unroll
    for (int i = kTokens - 1; i >= 0; i--) {
#pragma unroll
        for (int at = i; at < kTokens; at++) sums[pair_place(i, at)] = t.x[at] * t.key[i];
        decay_from(t.x, t, i);
    }
#pragma unroll
    for (int batch = 0; batch < (kPairs + kBatch - 1) / kBatch; batch++) {
        const float sum = warp_sums<kBatch, 16>(sums + batch * kBatch, lane);
        const int place = batch * kBatch + lane % 16 / 2;
        if (lane % 2 == 0 && lane % 16 < 2 * kBatch && place < kPairs)
            store_shared_float(shares + ((half ? 0 : kPairs) + place) * 4 * kMakers + 4 * maker, sum);
    }
}

DEVICE void meet_makers() { named_barrier(1, kMakers * 32); }

// A channel of the records' keys, decayed to the last, to the tables; returns the state's decay under them. Records that
// there are not are zeros.
DEVICE float make_fold(u32 tables, const Old& old, int channel, int half) {
    float decay[kOwnFolds], later = 1.f;
#pragma unroll
    for (int i = kOwnFolds - 1; i >= 0; i--) decay[i] = natural_exp(old.g[i]), later *= decay[i];
    const float other = __shfl_xor_sync(kAllLanes, later, 16);
    float total = half ? 1.f : other;
    const u32 to = tables + kFold + 4 * channel + half * kOwnFolds * kFoldPitch;
#pragma unroll
    for (int i = kOwnFolds - 1; i >= 0; i--) {
        store_shared_float(to + i * kFoldPitch, old.k[i] * total);
        total *= decay[i];
    }
#pragma unroll
    for (int i = kFolds; i < 4 * kPair * kGroups; i++)
        store_shared_float(tables + kFold + 4 * channel + i * kFoldPitch, 0.f);
    total = __shfl_sync(kAllLanes, total, threadIdx.x & 15);
    store_shared_float(tables + kDecay + 4 * channel, total);
    return total;
}

// The operands of a channel, times `decay`, in two bfloat16 numbers each: what they leave is 2^-17 of fp32.
DEVICE void store_operands(u32 tables, const float* x, float decay, int channel, int half) {
    const u32 to = tables + kOperands + half * kTokens * kOperandPitch + channel / 4 * 16 + channel % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTokens; i++) {
        const float operand = x[i] * decay;
        const u32 head = pack_bf16(operand, 0.f);
        store_shared_half(to + i * kOperandPitch, head);
        store_shared_half(to + i * kOperandPitch + 8, pack_bf16(operand - low_bf16(head), 0.f));
    }
}

// What keys and queries see of the records: a maker's share of the sums over channels, by the tensor cores. Operands,
// which it puts in the place of its channels of the tokens, are rows of the product, records its columns.
DEVICE void multiply_records(const float* x, u32 rows, u32 tables, u32 shares, int maker, int lane, int half) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int i = 0; i < kTokens; i++)
        store_shared_float(rows + 4 * (16 * maker + lane % 16) + (half * kTokens + i) * kRowPitch, x[i]);
    __syncwarp();
    const int channels = 4 * (16 * maker + 4 * c);
    const Quad none{0, 0, 0, 0};
    const Quad low = g < 2 * kTokens ? load_shared_quad(rows + g * kRowPitch + channels) : none;
    const Quad high = kTiles == 2 ? load_shared_quad(rows + (8 + g) * kRowPitch + channels) : none;
    const u32 a[8] = {tf32(low.x), tf32(high.x), tf32(low.y), tf32(high.y),
                      tf32(low.z), tf32(high.z), tf32(low.w), tf32(high.w)};
    const u32 a_rest[8] = {tf32_rest(low.x, a[0]), tf32_rest(high.x, a[1]), tf32_rest(low.y, a[2]),
                           tf32_rest(high.y, a[3]), tf32_rest(low.z, a[4]), tf32_rest(high.z, a[5]),
                           tf32_rest(low.w, a[6]), tf32_rest(high.w, a[7])};
    const u32 to = shares + maker * kSeenBytes;
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
        const Quad k = load_shared_quad(tables + kFold + (8 * i + g) * kFoldPitch + channels);
        const Words4 b = {tf32(k.x), tf32(k.y), tf32(k.z), tf32(k.w)};
        float d[4] = {}, e[4] = {};
        multiply(d, a, a_rest, b.x, b.y, tf32_rest(k.x, b.x), tf32_rest(k.y, b.y));
        multiply(e, a + 4, a_rest + 4, b.z, b.w, tf32_rest(k.z, b.z), tf32_rest(k.w, b.w));
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++)
            store_shared_pair(to + (((i * kTiles + tile) * 8 + g) * 8 + 2 * c) * 4, d[2 * tile] + e[2 * tile],
                              d[2 * tile + 1] + e[2 * tile + 1]);
    }
}
// The sums of all makers, as the consumers read them: records c and c + 4 side by side.
DEVICE void gather_seen(u32 tables, u32 shares, int thread) {
    for (int i = thread; i < kSeenBytes / 4; i += 32 * kMakers) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < kMakers; j++) sum += load_shared_float(shares + j * kSeenBytes + 4 * i);
        store_shared_float(tables + kSeen + 4 * (i / 8 * 8 + i % 4 * 2 + i / 4 % 2), sum);
    }
}

// M and W from the sums, by one maker; lane l has column l % 8. strength: of token lane.
DEVICE void solve(u32 shares, float strength, u32 mix, int lane) {
    float pairs[(2 * kPairs + 31) / 32], m[kTokens];
#pragma unroll
    for (int i = 0; i < (2 * kPairs + 31) / 32; i++) {
        const u32 from = shares + min(32 * i + lane, 2 * kPairs - 1) * 4 * kMakers;
        const Quad x = load_shared_quad(from), y = load_shared_quad(from + 16);
        pairs[i] = ((x.x + x.y) + (x.z + x.w)) + ((y.x + y.y) + (y.z + y.w));
    }
    auto pair = [&](int i, int at, bool query) -> float {
        const int place = (query ? 0 : kPairs) + pair_place(i, at);
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

// Where the last records of heads begin, written once nobody reads what was there any more: when the consumers have left
// the tables of the head, and so found it long ago.
struct Starts {
    u32 list;
    DEVICE void keep(const StepParams& p, int set, const Work& w) const {
        store_shared_words2(list + 8 * set, w.slot * p.value_heads + w.head, w.base);
    }
    DEVICE void none(int set) const { store_shared_words2(list + 8 * set, ~0u, 0); }
    DEVICE void write(const StepParams& p, int set) const {
        const Words2 x = load_shared_words2(list + 8 * set);
        if (x.x != ~0u) p.held[x.x] = x.y;
    }
};

DEVICE void make(const StepParams& p, u32 shared, Finder finder, int maker, int lane) {
    const u32 rows = shared + kTokenRows, shares = shared + kShares, seen_shares = shared + kSeenShares;
    const u32 asked = shared + kAsked, gates = shared + kGate;
    const int half = lane >> 4, channel = 16 * maker + lane % 16, thread = 32 * maker + lane;
    const List list{shared + kList};
    const Starts starts{shared + kStarts};
    if (kDeferred && thread == 0) {
        for (int i = 0; i < kSets; i++) starts.none(i);
    }
    Work work = list[0];
    if (work.slot >= 0) {
        ask_token(p, asked, work, find_turn(work, 0), maker, lane);
        if (p.q && maker == kMakers - 1) ask_gate(p, gates, work.head, lane);
        prefetch_records(p, list[1], thread);
        prefetch_tokens(p, list[1], thread);
    }
    copy_words_wait();
    meet_makers();
    int set = 0, free_parity = 1, solver = 0;
    for (int place = 0; work.slot >= 0; place++) {
        const int turns = count_turns(work);
        const Work next = list[place + 1];
        for (int index = 0; index < turns; index++) {
            const Turn turn = find_turn(work, index);
            if (index > 0) {
                ask_token(p, asked, work, turn, maker, lane);
                copy_words_wait();
            }
            Old old;
            load_records(p, old, work, turn, channel, half);
            u32 strength_bits = 0;
            if (turn.tokens > 0 && maker == solver) {
                const i64 beta = (work.tokens.first + turn.token + min(lane & 7, turn.tokens - 1)) * p.beta_token_stride +
                                 work.head * p.beta_head_stride;
                strength_bits = p.flags & kBetaFloat ? static_cast<const u32*>(p.beta)[beta]
                                                     : static_cast<const u16*>(p.beta)[beta];
            }
            Activated own;
            if (turn.tokens > 0 && maker < kTokens)
                own = activate(p, asked, gates + place % 2 * kGateBytes, turn.tokens, rows, maker, lane);
            if (index == turns - 1 && next.slot >= 0) {
                ask_token(p, asked, next, find_turn(next, 0), maker, lane);
                if (p.q && maker == kMakers - 1) ask_gate(p, gates + (place + 1) % 2 * kGateBytes, next.head, lane);
                const Work after = list[place + 2];
                prefetch_records(p, after, thread);
                prefetch_tokens(p, after, thread);
                if (maker == 0) finder.find(p, list, place, lane);
            }
            meet_makers();  // all tokens are there
            Channel tokens;
            float decayed[kTokens];
            if (turn.tokens > 0) {
                if (maker < turn.tokens) {
                    float* const to = p.records + work.slot * p.record_stride +
                                      (work.base + turn.token + maker) * p.record_position_stride +
                                      work.head * kRecord + 4 * lane;
                    store_four(to, 0, own.k, p.flags & kVectorRecords);
                    store_four(to, 128, own.g, p.flags & kVectorRecords);
                }
                tokens = load_channel(rows, channel, half);
#pragma unroll
                for (int i = 0; i < kTokens; i++) decayed[i] = tokens.x[i];
#pragma unroll
                for (int i = kTokens - 1; i >= 0; i--) decay_from(decayed, tokens, i);
            }
            const u32 tables = shared + kTables + set * kSetBytes;
            barrier_wait(shared + kUsed + 8 * set, free_parity);
            if (kDeferred && thread == 0) {
                starts.write(p, set);
                index == turns - 1 && turn.tokens > 0 ? starts.keep(p, set, work) : starts.none(set);
            }
            const float decay = make_fold(tables, old, channel, half);
            if (turn.tokens > 0) store_operands(tables, decayed, turn.apart ? decay : 1.f, channel, half);
            __syncwarp();
            if (arrives(lane)) barrier_arrive(shared + kMade + 8 * set);
            if (turn.apart) multiply_records(decayed, rows, tables, seen_shares, maker, lane, half);
            if (turn.tokens > 0) multiply_pairs(tokens, shares, maker, lane, half);
            copy_words_wait();
            meet_makers();  // all shares of sums are there, what the next turn asked for, and new records
            if (turn.tokens > 0 && maker == solver) {
                float strength = __uint_as_float(p.flags & kBetaFloat ? strength_bits : strength_bits << 16);
                if (p.flags & kBetaLogits) strength = sigmoid(strength) * p.beta_scale;
                solve(shares, lane < turn.tokens ? strength : 0.f, tables + kMix, lane);
            }
            if (turn.apart) gather_seen(tables, seen_shares, thread);
            solver = solver + 1 == kMakers ? 0 : solver + 1;
            __syncwarp();
            if (arrives(lane)) barrier_arrive(shared + kMixed + 8 * set);
            set = set + 1 == kSets ? 0 : set + 1;
            free_parity ^= set == 0;
        }
        work = next;
    }
    if (kDeferred && thread == 0) {
        for (int i = 0; i < kSets; i++) {
            barrier_wait(shared + kUsed + 8 * set, free_parity);
            starts.write(p, set);
            set = set + 1 == kSets ? 0 : set + 1;
            free_parity ^= set == 0;
        }
    }
}
