// The consumers of replay.cu: states from the pool and back, folded, multiplied, and what follows for outputs.
#pragma once
#include "replay_work.cuh"

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
