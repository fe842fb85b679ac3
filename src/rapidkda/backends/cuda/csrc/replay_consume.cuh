// The consumers of replay.cu: states from the pool and back, folded, multiplied, and what follows for outputs.
#pragma once
#include "replay_work.cuh"

// Corrections of a group of records: rows g, g + 8 of the warp's and record c, then c + 4.
struct Folded {
    u32 head[4], rest[4];
};
DEVICE Folded split_corrections(const float* u) {
    Folded x;
#pragma unroll
    for (int i = 0; i < 4; i++) x.head[i] = tf32(u[i]), x.rest[i] = tf32_rest(u[i], x.head[i]);
    return x;
}

// What folding takes of the tables for channels 16 n to 16 n + 15. Columns of the two products are channels 16 n + 2 g
// and 16 n + 2 g + 1, so that a lane's results are its channels.
struct FoldTables {
    Quad decay;
    Pair k[kGroups][kPair];  // of records c and c + 4
};
DEVICE FoldTables load_fold(u32 tables, int n, int g, int c) {
    const u32 at = tables + kFold + c * kFoldPitch + 64 * n + 8 * g;
    FoldTables t;
    t.decay = load_shared_quad(tables + kDecay + 64 * n + 16 * c);
#pragma unroll
    for (int i = 0; i < kGroups * kPair; i++) t.k[i / kPair][i % kPair] = load_shared_pair(at + i * 4 * kFoldPitch);
    return t;
}
// Adds a group of records' share to one channel of each of the lane's pairs.
DEVICE void add_group(float* d, const Folded& u, float k, float other) {
    const u32 k_head = tf32(k), k_rest = tf32_rest(k, k_head);
    if (kPair == 2) {
        const u32 other_head = tf32(other);
        multiply(d, u.head, u.rest, k_head, other_head, k_rest, tf32_rest(other, other_head));
    } else {
        mma_tf32_k4(d, u.rest, k_head), mma_tf32_k4(d, u.head, k_rest), mma_tf32_k4(d, u.head, k_head);
    }
}

// Rows g and g + 8 of a state, channels 16 n + 4 c to 16 n + 4 c + 3, under the records.
DEVICE void fold_records(Quad& low, Quad& high, const Folded* u, const FoldTables& t) {
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};  // channels 0 and 2, 1 and 3 of the lane's
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
        add_group(even, u[i], t.k[i][0].x, t.k[i][kPair - 1].x);
        add_group(odd, u[i], t.k[i][0].y, t.k[i][kPair - 1].y);
    }
    const Quad decay = t.decay;
    low = Quad{fmaf(low.x, decay.x, even[0]), fmaf(low.y, decay.y, odd[0]), fmaf(low.z, decay.z, even[1]),
               fmaf(low.w, decay.w, odd[1])};
    high = Quad{fmaf(high.x, decay.x, even[2]), fmaf(high.y, decay.y, odd[2]), fmaf(high.z, decay.z, even[3]),
                fmaf(high.w, decay.w, odd[3])};
}

// A state's 16 channels times every key and query, both in two bfloat16 numbers. sums[tile]: three parts, which do not
// wait for each other.
DEVICE void multiply_operands(float (*sums)[3][4], Quad low, Quad high, u32 tables, int n, int g, int c) {
    const u32 a[4] = {pack_bf16(low.x, low.y), pack_bf16(high.x, high.y), pack_bf16(low.z, low.w),
                      pack_bf16(high.z, high.w)};
    auto rest = [](float x, float y, u32 head) -> u32 { return pack_bf16(x - low_bf16(head), y - high_bf16(head)); };
    const u32 a_rest[4] = {rest(low.x, low.y, a[0]), rest(high.x, high.y, a[1]), rest(low.z, low.w, a[2]),
                           rest(high.z, high.w, a[3])};
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
        const Words4 b = load_shared_words4(tables + kOperands + (8 * tile + g) * kOperandPitch + 64 * n + 16 * c);
        mma(sums[tile][0], a, b.x, b.y), mma(sums[tile][1], a, b.z, b.w), mma(sums[tile][2], a_rest, b.x, b.y);
    }
}

// The records' share of the products, where the state is without them.
DEVICE void add_seen(float (*sums)[3][4], const Folded* u, u32 tables, int g, int c) {
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++) {
            const u32 at = tables + (((i * kTiles + tile) * 8 + g) * 8 + 2 * c) * 4;
            const Pair seen = load_shared_pair(at + kSeen);
            const Words2 b = {tf32(seen.x), tf32(seen.y)};
            mma_tf32(sums[tile][0], u[i].head, b.x, b.y);
            mma_tf32(sums[tile][1], u[i].head, tf32_rest(seen.x, b.x), tf32_rest(seen.y, b.y));
            mma_tf32(sums[tile][2], u[i].rest, b.x, b.y);
        }
    }
}

// Of a turn: what a consumer's lane reads from global memory.
struct Rows4 {
    float u[4 * kGroups];  // corrections: rows g, g + 8 of record c, then of record c + 4, a group
    u32 values[4];  // v, as bits: rows g and g + 8, of tokens 2 c and 2 c + 1 each
};

DEVICE Rows4 load_rows(const StepParams& p, const Work& w, const Turn& t, int row, int c) {
    Rows4 x;
    const float* u = p.records + w.slot * p.record_stride + w.head * kRecord + 256 + row;
    const u16* v = p.v + static_cast<i64>(w.tokens.first + t.token) * p.v_token_stride + w.head * p.v_head_stride + row;
#pragma unroll
    for (int i = 0; i < 4 * kGroups; i++) {
        const int record = c + (i >> 1) * 4;
        x.u[i] = record < t.folds ? u[(t.record + record) * p.record_position_stride + (i & 1) * Rows::kUpper] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = 2 * c + (i & 1);
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
    float* const records = p.records + opaque(w.slot * p.record_stride + (w.base + t.token) * p.record_position_stride +
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

DEVICE void consume(const StepParams& p, u32 shared, int warp, int lane) {
    const int g = lane >> 2, c = lane & 3, first_row = warp * Rows::kRows, row = first_row + Rows::row(g);
    const u32 ring = shared + kRing + warp * kStages * Rows::kBytes, full = shared + kBarriers + warp * kStages * 8;
    const List list{shared + kList};
    // Asks for the state of a head of the list, whose stage the warp has left, or has not come to.
    auto fetch = [&](int place) {
        const Work w = list[place];
        if (w.slot >= 0)
            Rows::fetch(p, ring + place % kStages * Rows::kBytes, w.slot * p.pool_stride + w.head * kMatrix, first_row,
                        full + 8 * (place % kStages), lane);
        if (!kPrefetchStates) return;
        const Work far = list[place + kFar];
        if (far.slot >= 0 && lane == 0 && p.flags & kVectorStates)
            Rows::prefetch(p, far.slot * p.pool_stride + far.head * kMatrix, first_row);
    };
#pragma unroll 1
    for (int i = 0; i < kStages && list[i].slot >= 0; i++) fetch(i);

    int set = 0, made_parity = 0;
    Work work = list[0];
    Rows4 inputs{};
    if (work.slot >= 0) inputs = load_rows(p, work, find_turn(work, 0), row, c);
    bool written = false;  // the stage of the head before, which has to leave it first
    for (int place = 0; work.slot >= 0; place++) {
        const int stage = place % kStages;
        const i64 offset = work.slot * p.pool_stride + work.head * kMatrix;
        const int turns = count_turns(work);
        barrier_wait(full + 8 * stage, place / kStages & 1);
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
            if (written) {
                if (lane == 0) wait_for_reads();
                __syncwarp();
                fetch(place - 1 + kStages);
            }
            next = list[place + 1];
            if (next.slot >= 0) ahead = load_rows(p, next, find_turn(next, 0), row, c);
        };
        bool refilled = false;

        for (int index = 0; index < turns; index++) {
            const Turn turn = find_turn(work, index);
            if (index > 0) inputs = load_rows(p, work, turn, row, c);
            Folded u[kGroups];
#pragma unroll
            for (int i = 0; i < kGroups; i++) u[i] = split_corrections(inputs.u + 4 * i);
            const u32 tables = shared + kTables + set * kSetBytes;
            barrier_wait(shared + kMade + 8 * set, made_parity);
            float sums[kTiles][3][4];
#pragma unroll
            for (int i = 0; i < kTiles * 12; i++) sums[i / 12][i / 4 % 3][i % 4] = 0.f;
            if (turn.apart) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    if (i == 2) look_ahead();
                    take(i);
                    multiply_operands(sums, low[i], high[i], tables, i, g, c);
                }
                __syncwarp();
                fetch(place + kStages), refilled = true;
                barrier_wait(shared + kMixed + 8 * set, made_parity);
                add_seen(sums, u, tables, g, c);
            } else if (turn.stores && turn.tokens > 0 && p.flags & kVectorStates) {  // the usual turn
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
            if (!turn.apart) barrier_wait(shared + kMixed + 8 * set, made_parity);
            if (turn.tokens > 0) finish_tokens(p, work, turn, row, tables, sums, inputs.values, g, c);
            __syncwarp();  // all of the tables and of the stage is read, and new corrections are there for the next turn
            if (arrives(lane)) barrier_arrive(shared + kUsed + 8 * set);
            set = set + 1 == kSets ? 0 : set + 1;
            made_parity ^= set == 0;
        }
        written = !refilled;
        work = next, inputs = ahead;
    }
    if (lane == 0) wait_for_reads();  // what they read must outlast them
}
