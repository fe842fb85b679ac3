// Verification by replay, and commit: fold the accepted records into the state, store it, run the drafts, record them.
// The tokens of a request are one small chunk; with D_i the decay from the state to token i, all of them read the state
// at once, and what a token sees of those before it follows from sums over channels that need no state:
//
//     u_i = b_i (v_i - S (D_i k_i) - sum_j<i a_ij u_j)      o_i = S (D_i q_i) + sum_j<=i c_ij u_j
//     a_ij, c_ij: the sums over channels of k_i k_j and q_i k_j times the decay from j to i
//
// so u = M r and o = S (D q) + W r with r = v - S (D k), M = (1 + b a)^-1 b, W = c M. Every decay is a product of decays
// of single tokens: nothing overflows, and no difference of sums loses digits.
//
// A CTA takes one head of one request after another. Four maker warps turn keys, queries and gates of later heads into
// tables in shared memory: each activates some of the tokens, and then takes a quarter of the channels of all. Consumer
// warps own 16 rows of the state each, which the copy engine brings ahead and writes back, and multiply them in TF32
// (three products for nearly fp32). Records of keys and decays are the makers', corrections those of the warp that owns
// their rows, so nobody overwrites what another has yet to read. Requests of more tokens or records than a chunk holds
// take several turns, see Turn.
//
// Compiled with KDA_STATE_FLOAT, KDA_TOKENS, the size of a chunk (2, 4 or 8), and KDA_MANY_TURNS defined.
#include "mma.cuh"
#include "steps.cuh"

constexpr int kTokens = KDA_TOKENS;
constexpr bool kPrefetchStates = KDA_TOKENS == 2;  // into L2, two heads ahead; with more to do a head it only costs
constexpr bool kManyTurns = KDA_MANY_TURNS;  // a request may have more tokens or records than that
constexpr int kTiles = kTokens == 8 ? 2 : 1;  // of 8 columns: the keys' products, then the queries', of a chunk
constexpr int kOperandRows = 8 * kTiles;      // the first 2 kTokens of which are in use
using Rows = States<KDA_STATE_FLOAT>;
constexpr int kConsumers = 128 / Rows::kRows;
constexpr int kStages = KDA_STATE_FLOAT ? 2 : 4;  // heads whose states are on their way or at work
constexpr int kMakers = 4;                        // warps, which make the tables of a turn together
constexpr int kSets = kTokens == 8 ? 2 : 4;       // of tables
constexpr int kThreads = (kConsumers + kMakers) * 32;
// Registers a thread, moved between the roles at the start. setmaxnreg acts on whole warpgroups and hangs where the
// roles want more than the launch took.
constexpr int kLaunchRegisters = 168, kConsumerRegisters = 200, kMakerRegisters = 104;
static_assert(kConsumers * kConsumerRegisters + kMakers * kMakerRegisters <= kThreads / 32 * kLaunchRegisters);

// Rows in shared memory are this far apart so that no two of a warp's lanes meet in a bank.
constexpr int kOperandPitch = 128 * 4 + 64;  // bytes: lanes read four channels of eight rows
constexpr int kPair = kTokens == 8 ? 2 : 1;            // keys of records that lie side by side: c and c + 4
constexpr int kFoldPitch = 128 * 4 * kPair + 32;

// Tables, in bytes. Operands are TF32 numbers and what is left of fp32 (`rest`).
constexpr int kFold = 0;  // [4][128][kPair]: keys of records, decayed to the last
constexpr int kFoldRest = kFold + 4 * kFoldPitch;
constexpr int kDecay = kFoldRest + 4 * kFoldPitch;  // [128]: of the state under the records
constexpr int kOperands = kDecay + 128 * 4;  // [kOperandRows][128]: keys, queries, decayed from the state to their token
constexpr int kOperandsRest = kOperands + kOperandRows * kOperandPitch;
constexpr int kMix = kOperandsRest + kOperandRows * kOperandPitch;  // [kOperandRows][8]: M, W
constexpr int kMixRest = kMix + kOperandRows * 8 * 4;
constexpr int kSetBytes = kMixRest + kOperandRows * 8 * 4;

// Shared memory.
constexpr int kTables = 0;
// [5 kTokens][128]: keys, queries, decays of a turn; keys and decays of the records that it folds
constexpr int kTokenRows = kTables + kSets * kSetBytes;
constexpr int kShares = kTokenRows + 5 * kTokens * 128 * 4;  // [kTokens^2][kMakers]: of sums
constexpr int kRing = (kShares + kTokens * kTokens * 16 + 127) / 128 * 128;
constexpr int kFar = 2;                                    // heads whose states come to the L2 cache before that
constexpr int kWorkBytes = 32, kWorks = kStages + kFar + 2;  // heads that a consumer warp has found
constexpr int kLists = kRing + kConsumers * kStages * Rows::kBytes;
constexpr int kBarriers = kLists + kConsumers * kWorks * kWorkBytes;
constexpr int kMade = kBarriers + kConsumers * kStages * 8;  // after the barriers of the stages
constexpr int kUsed = kMade + kSets * 8;
constexpr int kBytes = kUsed + kSets * 8;
static_assert(kBytes + 128 <= 227 * 1024);

struct LaunchInfo {
    int threads, shared_bytes, cluster;
};
extern "C" __constant__ const LaunchInfo launch_info = {kThreads, kBytes + 128, 1};

struct Request {
    Tokens tokens;
    int slot;      // row of the pool, -1: padding
    int accepted;  // records to fold
    int turns;     // 0: nothing to do but zeros for padding
};

DEVICE int chunks(int count) { return (count + kTokens - 1) / kTokens; }
DEVICE int count_turns(int accepted, int count) {
    return kManyTurns ? max(chunks(accepted), 1) + max(chunks(count), 1) - 1 : 1;
}

// What the tables say of a request.
struct Entry {
    Words2 slot, accepted;
    int first, length;
};
template <bool kEarly = false>
DEVICE Entry load_entry(const StepParams& p, int n) {
    Entry e;
    e.slot = load_index<kEarly>(p.slots, n * p.slot_stride, p.flags & kSlots64);
    e.accepted = load_index<kEarly>(p.accepted, n * p.accepted_stride, p.flags & kAccepted64);
    e.first = e.length = 0;
    if (p.q) {
        e.first = load_int<kEarly>(p.first_token + n * p.first_stride);
        e.length = load_int<kEarly>(p.length + n * p.length_stride);
    }
    return e;
}

DEVICE Request read_entry(const StepParams& p, const Entry& e) {
    Request r;
    r.accepted = accepted_count(p, widen_index(e.accepted, p.flags & kAccepted64));
    r.tokens = segment_tokens(p, e.first, e.length);
    r.slot = pool_row(p, widen_index(e.slot, p.flags & kSlots64));
    const bool idle = r.slot < 0 || (p.q ? r.tokens.count : r.accepted) == 0;
    if (idle) r.accepted = 0;
    r.turns = idle ? 0 : count_turns(r.accepted, r.tokens.count);
    return r;
}

// The heads of a CTA: every gridDim.x-th, so that all CTAs together read and write memory in order.
struct Walk {
    Entry entry;  // of this head's request; asked for a step ahead
    int n, head, left;
};

DEVICE int key_head(const StepParams& p, int head) { return p.group == 1 ? head : head / p.group; }

DEVICE Walk begin_walk(const StepParams& p) {
    const int heads = p.segments * p.value_heads, at = blockIdx.x;
    Walk w;
    w.n = at / p.value_heads, w.head = at - w.n * p.value_heads;
    w.left = at < heads ? (heads - at + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x) : 0;
    if (w.left > 0) w.entry = load_entry(p, w.n);
    return w;
}

DEVICE void step(const StepParams& p, Walk& w) {
    w.left--;
    const int requests = gridDim.x / p.value_heads;
    w.n += requests, w.head += gridDim.x - requests * p.value_heads;
    if (w.head >= p.value_heads) w.head -= p.value_heads, w.n++;
    if (w.left > 0) w.entry = load_entry(p, w.n);
}

// A turn folds records and then runs tokens. The last turn that folds what was accepted runs the first chunk; each one
// after that folds the chunk before, from its new records, and runs the next.
struct Turn {
    int record, folds;  // first record, how many
    int token, tokens;  // first token of the segment, how many
    bool stores;        // the state is the one to keep
};

DEVICE Turn find_turn(int accepted, int count, int index) {
    const int before = kManyTurns ? max(chunks(accepted), 1) - 1 : 0;  // turns that only fold
    const int chunk = index - before;
    Turn t;
    t.record = (chunk <= 0 ? index : chunk - 1) * kTokens;
    t.folds = chunk <= 0 ? min(accepted - t.record, kTokens) : kTokens;
    t.token = max(chunk, 0) * kTokens;
    t.tokens = chunk < 0 ? 0 : min(count - t.token, kTokens);
    t.stores = chunk == 0 && accepted > 0;
    return t;
}

// One head of one request.
struct Work {
    int slot = -1, head = 0, accepted = 0;  // slot -1: there is no more
    Tokens tokens = {0, 0};
    int key_head = 0;
};

DEVICE void store_work(u32 to, const Work& w) {
    store_shared_words4(to, Words4{static_cast<u32>(w.slot), static_cast<u32>(w.head), static_cast<u32>(w.accepted),
                                   static_cast<u32>(w.tokens.first)});
    store_shared(to + 16, w.tokens.count);
}
DEVICE Work load_work(u32 from) {
    const Words4 x = load_shared_words4(from);
    return Work{static_cast<int>(x.x), static_cast<int>(x.y), static_cast<int>(x.z),
                Tokens{static_cast<int>(x.w), static_cast<int>(load_shared(from + 16))}, 0};
}

// The next head that has something to do.
DEVICE Work next_work(const StepParams& p, Walk& walk) {
    Work w;
    for (; w.slot < 0 && walk.left > 0; step(p, walk)) {
        const Request r = read_entry(p, walk.entry);
        if (r.turns > 0) w = Work{r.slot, walk.head, r.accepted, r.tokens, key_head(p, walk.head)};
    }
    return w;
}

// x as a TF32 number and the rest of it.
DEVICE u32 tf32(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }
DEVICE u32 tf32_rest(float x, u32 head) { return __float_as_uint(x - __uint_as_float(head)); }

DEVICE void store_split(u32 head, u32 rest, Quad x) {
    const Words4 h = {tf32(x.x), tf32(x.y), tf32(x.z), tf32(x.w)};
    store_shared_words4(head, h);
    store_shared_words4(rest, Words4{tf32_rest(x.x, h.x), tf32_rest(x.y, h.y), tf32_rest(x.z, h.z),
                                     tf32_rest(x.w, h.w)});
}

// ---- makers

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

// ---- consumers

// d += a b to nearly fp32; the operands in two parts each.
DEVICE void multiply(float* d, const u32* a, const u32* a_rest, u32 b0, u32 b1, u32 b0_rest, u32 b1_rest) {
    mma_tf32(d, a_rest, b0, b1);
    mma_tf32(d, a, b0_rest, b1_rest);
    mma_tf32(d, a, b0, b1);
}

// Corrections of folded records: rows g, g + 8 of the warp's and record c, then c + 4.
struct Folded {
    u32 head[4], rest[4];
};

// What folding takes of the tables for channels 16 n to 16 n + 15. Columns of the two products are channels 16 n + 2 g
// and 16 n + 2 g + 1, so that a lane's results are its channels.
struct FoldTables {
    Quad decay;
    u32 k[2 * kPair], rest[2 * kPair];
};
DEVICE FoldTables load_fold(u32 tables, int n, int g, int c) {
    const u32 at = tables + kFold + c * kFoldPitch + (64 * n + 8 * g) * kPair, rest = at + kFoldRest - kFold;
    FoldTables t;
    t.decay = load_shared_quad(tables + kDecay + 64 * n + 16 * c);
    if (kPair == 2) {
        const Words4 x = load_shared_words4(at), y = load_shared_words4(rest);
        t.k[0] = x.x, t.k[1] = x.y, t.k[2 * kPair - 2] = x.z, t.k[2 * kPair - 1] = x.w;
        t.rest[0] = y.x, t.rest[1] = y.y, t.rest[2 * kPair - 2] = y.z, t.rest[2 * kPair - 1] = y.w;
    } else {
        const Words2 x = load_shared_words2(at), y = load_shared_words2(rest);
        t.k[0] = x.x, t.k[1] = x.y, t.rest[0] = y.x, t.rest[1] = y.y;
    }
    return t;
}

// Rows g and g + 8 of a state, channels 16 n + 4 c to 16 n + 4 c + 3, under the records.
DEVICE void fold_records(Quad& low, Quad& high, const Folded& u, const FoldTables& t) {
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};  // channels 0 and 2, 1 and 3 of the lane's
    if (kPair == 2) {
        multiply(even, u.head, u.rest, t.k[0], t.k[1], t.rest[0], t.rest[1]);
        multiply(odd, u.head, u.rest, t.k[2 * kPair - 2], t.k[2 * kPair - 1], t.rest[2 * kPair - 2],
                 t.rest[2 * kPair - 1]);
    } else {
        mma_tf32_k4(even, u.rest, t.k[0]), mma_tf32_k4(even, u.head, t.rest[0]), mma_tf32_k4(even, u.head, t.k[0]);
        mma_tf32_k4(odd, u.rest, t.k[1]), mma_tf32_k4(odd, u.head, t.rest[1]), mma_tf32_k4(odd, u.head, t.k[1]);
    }
    const Quad decay = t.decay;
    low = Quad{fmaf(low.x, decay.x, even[0]), fmaf(low.y, decay.y, odd[0]), fmaf(low.z, decay.z, even[1]),
               fmaf(low.w, decay.w, odd[1])};
    high = Quad{fmaf(high.x, decay.x, even[2]), fmaf(high.y, decay.y, odd[2]), fmaf(high.z, decay.z, even[3]),
                fmaf(high.w, decay.w, odd[3])};
}

// A state's 16 channels times every key and query. sums[tile]: three parts, which do not wait for each other.
DEVICE void multiply_operands(float (*sums)[3][4], Quad low, Quad high, u32 tables, int n, int g, int c) {
    const u32 a[8] = {tf32(low.x), tf32(high.x), tf32(low.y), tf32(high.y),
                      tf32(low.z), tf32(high.z), tf32(low.w), tf32(high.w)};
    const u32 a_rest[8] = {tf32_rest(low.x, a[0]), tf32_rest(high.x, a[1]), tf32_rest(low.y, a[2]),
                           tf32_rest(high.y, a[3]), tf32_rest(low.z, a[4]), tf32_rest(high.z, a[5]),
                           tf32_rest(low.w, a[6]), tf32_rest(high.w, a[7])};
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
        const u32 at = tables + (8 * tile + g) * kOperandPitch + 64 * n + 16 * c;
        const Words4 b = load_shared_words4(at + kOperands), b_rest = load_shared_words4(at + kOperandsRest);
        mma_tf32(sums[tile][0], a, b.x, b.y);
        mma_tf32(sums[tile][1], a, b_rest.x, b_rest.y);
        mma_tf32(sums[tile][2], a_rest, b.x, b.y);
        mma_tf32(sums[tile][0], a + 4, b.z, b.w);
        mma_tf32(sums[tile][1], a + 4, b_rest.z, b_rest.w);
        mma_tf32(sums[tile][2], a_rest + 4, b.z, b.w);
    }
}

// Of a turn: what a consumer's lane reads from global memory.
struct Rows4 {
    float u[4];     // corrections: rows g, g + 8 of record c, then of record c + 4
    u32 values[4];  // v, as bits: rows g and g + 8, of tokens 2 c and 2 c + 1 each
};

DEVICE Rows4 load_rows(const StepParams& p, const Work& w, const Turn& t, int row, int c) {
    Rows4 x;
    const float* u = p.records + w.slot * p.record_stride + w.head * kRecord + 256 + row;
    const u16* v = p.v + static_cast<i64>(w.tokens.first + t.token) * p.v_token_stride + w.head * p.v_head_stride + row;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int record = c + (i >> 1) * 4, token = 2 * c + (i & 1);
        x.u[i] = record < t.folds ? u[(t.record + record) * p.record_position_stride + (i & 1) * Rows::kUpper] : 0.f;
        x.values[i] = token < t.tokens ? v[token * p.v_token_stride + (i >> 1) * Rows::kUpper] : 0;
    }
    return x;
}

// Corrections and outputs of the chunk's tokens: `sums` are the state's products with keys and queries.
DEVICE void finish_tokens(const StepParams& p, const Work& w, const Turn& t, int row, u32 tables, float (*sums)[3][4],
                          const u32* values, int g, int c) {
    float left[4], result[kTiles][4];  // left: of the values
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float seen = sums[0][0][i] + (sums[0][1][i] + sums[0][2][i]);
        const bool key = kTokens == 8 || c < kTokens / 2;  // with few tokens, columns after theirs are the queries'
        left[i] = key ? __uint_as_float(values[i] << 16) - seen : 0.f;
        result[0][i] = key ? 0.f : seen;
        if (kTiles == 2) result[kTiles - 1][i] = sums[kTiles - 1][0][i] + (sums[kTiles - 1][1][i] + sums[kTiles - 1][2][i]);
    }
    // Columns 2 c and 2 c + 1 of a result are columns c and c + 4 of the operand.
    const u32 a[4] = {tf32(left[0]), tf32(left[2]), tf32(left[1]), tf32(left[3])};
    const u32 a_rest[4] = {tf32_rest(left[0], a[0]), tf32_rest(left[2], a[1]), tf32_rest(left[1], a[2]),
                           tf32_rest(left[3], a[3])};
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
        const u32 at = tables + ((8 * tile + g) * 8 + 2 * c) * 4;
        const Words2 b = load_shared_words2(at + kMix), b_rest = load_shared_words2(at + kMixRest);
        multiply(result[tile], a, a_rest, b.x, b.y, b_rest.x, b_rest.y);
    }
    // Of this lane's rows; opaque, so that no address of a store waits in a register for the products.
    float* const records = p.records + opaque(w.slot * p.record_stride + t.token * p.record_position_stride +
                                              w.head * kRecord + 256 + row);
    u16* const out = p.out + opaque((w.tokens.first + t.token) * p.out_token_stride + w.head * p.out_head_stride + row);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int lower = (i >> 1) * Rows::kUpper, column = 2 * c + (i & 1);
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++) {
            const int token = (8 * tile + column) % kTokens;
            if (token >= t.tokens || 8 * tile + column >= 2 * kTokens) continue;
            if (8 * tile + column < kTokens)
                records[token * p.record_position_stride + lower] = result[tile][i];
            else
                out[token * p.out_token_stride + lower] = static_cast<u16>(pack_bf16(result[tile][i], 0.f));
        }
    }
}

DEVICE void write_zeros(const StepParams& p, const Tokens& tokens, int head, int row, int lane) {
    for (int j = 0; j < tokens.count; j++)
        if (lane < Rows::kRows) store_output(p, tokens.first + j, head, row + lane, 0.f);
}

// The reader of a consumer warp. It finds heads ahead of asking for their states.
struct Reader {
    Walk walk;
    int found, place, stage;  // places in the list: of the next head to find and to ask for; the stage that this goes to
    u32 ring, full, list;
};

// Finds the next head that has a state to read.
DEVICE void find(const StepParams& p, Reader& r, bool prefetch, int first_row, int lane) {
    Work w;
    for (; w.slot < 0 && r.walk.left > 0; step(p, r.walk)) {
        const Request request = read_entry(p, r.walk.entry);
        if (request.slot < 0) write_zeros(p, request.tokens, r.walk.head, first_row, lane);
        if (request.turns > 0) w = Work{request.slot, r.walk.head, request.accepted, request.tokens, 0};
    }
    if (lane == 0) {
        store_work(r.list + r.found * kWorkBytes, w);
        if (kPrefetchStates && prefetch && w.slot >= 0 && p.flags & kVectorStates)
            Rows::prefetch(p, w.slot * p.pool_stride + w.head * kMatrix, first_row);
    }
    r.found = r.found + 1 == kWorks ? 0 : r.found + 1;
    __syncwarp();
}

// Asks for the state of a head that was found.
DEVICE void fetch(const StepParams& p, Reader& r, int first_row, int lane) {
    const Work w = load_work(r.list + r.place * kWorkBytes);
    r.place = r.place + 1 == kWorks ? 0 : r.place + 1;
    if (w.slot < 0) return;
    Rows::fetch(p, r.ring + r.stage * Rows::kBytes, w.slot * p.pool_stride + w.head * kMatrix, first_row,
                r.full + 8 * r.stage, lane);
    r.stage = r.stage + 1 == kStages ? 0 : r.stage + 1;
}

DEVICE void consume(const StepParams& p, u32 shared, int warp, int lane) {
    const int g = lane >> 2, c = lane & 3, first_row = warp * Rows::kRows, row = first_row + Rows::row(g);
    const u32 ring = shared + kRing + warp * kStages * Rows::kBytes, full = shared + kBarriers + warp * kStages * 8;
    const u32 list = shared + kLists + warp * kWorks * kWorkBytes;
    Reader reader{begin_walk(p), 0, 0, 0, ring, full, list};
#pragma unroll 1
    for (int i = 0; i < kStages + kFar; i++) {
        find(p, reader, i >= kStages, first_row, lane);
        if (i < kStages) fetch(p, reader, first_row, lane);
    }

    int stage = 0, place = 0, parity = 0, set = 0, made_parity = 0;
    Work work = load_work(list);
    Rows4 inputs{};
    if (work.slot >= 0) inputs = load_rows(p, work, find_turn(work.accepted, work.tokens.count, 0), row, c);
    bool first = true;
    while (work.slot >= 0) {
        const i64 offset = work.slot * p.pool_stride + work.head * kMatrix;
        const int turns = count_turns(work.accepted, work.tokens.count);
        barrier_wait(full + 8 * stage, parity);
        const u32 from = ring + stage * Rows::kBytes + Rows::place(g);
        Quad low[8], high[8];  // the state: rows g and g + 8
        auto take = [&](int i) {
            low[i] = Rows::load(from, 4 * i + c);
            high[i] = Rows::load(from + Rows::kUpper * Rows::kRowBytes, 4 * i + c);
        };
        if (kManyTurns) {
#pragma unroll
            for (int i = 0; i < 8; i++) take(i);
        }
        Work next;
        Rows4 ahead{};
        // In the middle of a head's work: the copy engine has had time to read the stage of the one before, and has time
        // to fill it.
        auto look_ahead = [&] {
            if (!first) {
                if (lane == 0) wait_for_reads();
                fetch(p, reader, first_row, lane);
                find(p, reader, true, first_row, lane);
            }
            place = place + 1 == kWorks ? 0 : place + 1;
            next = load_work(list + place * kWorkBytes);
            if (next.slot >= 0) ahead = load_rows(p, next, find_turn(next.accepted, next.tokens.count, 0), row, c);
        };

        for (int index = 0; index < turns; index++) {
            const Turn turn = find_turn(work.accepted, work.tokens.count, index);
            if (index > 0) inputs = load_rows(p, work, turn, row, c);
            Folded u;
#pragma unroll
            for (int i = 0; i < 4; i++) u.head[i] = tf32(inputs.u[i]), u.rest[i] = tf32_rest(inputs.u[i], u.head[i]);
            const u32 tables = shared + kTables + set * kSetBytes;
            barrier_wait(shared + kMade + 8 * set, made_parity);
            float sums[kTiles][3][4];
#pragma unroll
            for (int i = 0; i < kTiles * 12; i++) sums[i / 12][i / 4 % 3][i % 4] = 0.f;
            if (turn.stores && turn.tokens > 0 && p.flags & kVectorStates) {  // the usual turn
                if (!kManyTurns) take(0);
                FoldTables fold = load_fold(tables, 0, g, c);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    if (i == 4 && index == 0) look_ahead();
                    const FoldTables now = fold;
                    if (i < 7) {
                        if (!kManyTurns) take(i + 1);
                        fold = load_fold(tables, i + 1, g, c);
                    }
                    fold_records(low[i], high[i], u, now);
                    Rows::put(from, 4 * i + c, low[i]);
                    Rows::put(from + Rows::kUpper * Rows::kRowBytes, 4 * i + c, high[i]);
                    multiply_operands(sums, low[i], high[i], tables, i, g, c);
                }
                fence_async_proxy();
                __syncwarp();
                if (lane == 0) Rows::write(p, ring + stage * Rows::kBytes, offset, first_row);
            } else {
                if (index == 0) look_ahead();
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    if (!kManyTurns) take(i);
                    if (turn.folds > 0) fold_records(low[i], high[i], u, load_fold(tables, i, g, c));
                    if (turn.stores) {
                        Rows::store(p, offset, row, 4 * i + c, low[i]);
                        Rows::store(p, offset, row + Rows::kUpper, 4 * i + c, high[i]);
                    }
                    if (turn.tokens > 0) multiply_operands(sums, low[i], high[i], tables, i, g, c);
                }
            }
            if (turn.tokens > 0) finish_tokens(p, work, turn, row, tables, sums, inputs.values, g, c);
            __syncwarp();  // all of the tables and of the stage is read, and new corrections are there for the next turn
            if (arrives(lane)) barrier_arrive(shared + kUsed + 8 * set);
            set = set + 1 == kSets ? 0 : set + 1;
            made_parity ^= set == 0;
        }
        stage = stage + 1 == kStages ? 0 : stage + 1;
        parity ^= stage == 0;
        first = false;
        work = next, inputs = ahead;
    }
    if (lane == 0) wait_for_reads();  // what they read must outlast them
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

// Brings what a warp reads of the CTA's first heads into the L2 cache, by tables that may be another step's.
DEVICE void prefetch_first(const StepParams& p, int warp, int lane) {
    const int heads = p.segments * p.value_heads;
#pragma unroll 1
    for (int i = 0, at = blockIdx.x; i < kStages && at < heads; i++, at += gridDim.x) {
        const int n = at / p.value_heads, head = at - n * p.value_heads;
        const Request r = read_entry(p, load_entry<true>(p, n));
        if (r.turns == 0) continue;
        if (warp >= kConsumers)
            prefetch_inputs(p, Work{r.slot, head, r.accepted, r.tokens, key_head(p, head)},
                            (warp - kConsumers) * 32 + lane);
        else if (lane == 0 && p.flags & kVectorStates)
            Rows::prefetch(p, r.slot * p.pool_stride + head * kMatrix, warp * Rows::kRows);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) replay(const __grid_constant__ StepParams p) {
    extern __shared__ u8 dynamic_shared[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(kAllLanes, threadIdx.x >> 5, 0);
    const u32 shared = (shared_address(dynamic_shared) + 127) & ~127u;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kConsumers * kStages; i++) barrier_init(shared + kBarriers + 8 * i, kWarpArrivals);
        for (int i = 0; i < kSets; i++) {
            barrier_init(shared + kMade + 8 * i, kMakers * kWarpArrivals);
            barrier_init(shared + kUsed + 8 * i, kConsumers * kWarpArrivals);
        }
        barrier_init_fence();
    }
    start_dependents();
    prefetch_first(p, warp, lane);
    wait_for_dependencies();
    __syncthreads();
    if (warp < kConsumers) {
        claim_registers<kConsumerRegisters>();
        consume(p, shared, warp, lane);
    } else {
        release_registers<kMakerRegisters>();
        make(p, shared, warp - kConsumers, lane);
    }
}
