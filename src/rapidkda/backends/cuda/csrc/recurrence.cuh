// The consumers: the recurrence of one head over the chunks that the producers prepare.
//
// A warpgroup keeps 64 rows (V) of the state in fp32 accumulators, V as the M dimension, so that the state is the A
// operand of every product after a conversion in registers and never visits shared memory. Per chunk:
//   [W | O'] = S [kd | qd]^T      one wgmma chain, n = 32: the delta rule's read and the inter-chunk output together
//   R = V - W,  U = R Tinv^T      mma.sync, tf32: fp32 words as they are
//   O = O' + U Aqk^T              mma.sync, fp16
//   S = decay S + U kr            wgmma, n = 128, fp16: bf16 keys alone would cost 7e-3 of the state when U telescopes
//
// Eleven bits of R, Tinv and U suffice, since the entries of Tinv are at most about 1 in magnitude and the read of the
// next chunk corrects what U's rounding has left along the keys. Two kinds of chunks need more, and the producers mark
// them (layout.cuh, Exact): keys that are nearly the same, where the errors of up to 16 writes add up, and writes of a
// strength near 1, which leave less of the state than the rounding of what they take away. There R, Tinv and U come with
// their low parts, and with strong writes the keys of the update too: no read sees what rounding a key has done to the
// state, so where one key is written over and over it adds up (5e-3 of the state after 512 tokens, 7e-4 with low parts).
//
// The critical path is state -> W -> U -> state. The loop is rotated, front(i) = W and U of chunk i, back(i) = its
// update, and everything else lies beside one of the two wgmma chains: the decay and the stores of the last output
// beside W, the loads of the next operands and the scaling of the output beside the update. Waiting for all but the
// newest group right after W is committed tells the assembler that the state's own product is done, so the decay may
// run beside W.
#pragma once
#include "mma.cuh"
#include "shared.cuh"
#include "barrier.cuh"
#include "transition.cuh"
#include "work.cuh"

// Of a word with the values of tokens `token` and `token` + 1, the bits of those below `rows`.
DEVICE u32 kept_tokens(int token, int rows) { return token >= rows ? 0u : token + 1 >= rows ? 0xffffu : ~0u; }

// U meets the state's update in fp16, whose range is narrow. So a warp keeps its rows of the state, and with them U,
// scaled by a power of two that it moves when U leaves the middle of that range: exact, and nearly never. No row of the
// state is shared between warps.
struct Range {
    static constexpr float kLow = 0x1p-7f, kHigh = 0x1p12f;
    static constexpr float kMost = 0x1p60f;
    static constexpr u32 kOnes = 0x3f803f80u;
    u32 in = kOnes;    // scale of what comes in (V), two bf16
    float low = kLow;  // 0 where `in` is at its most: a state that only decays (a transition's M) arrives there for good

    DEVICE u32 out() const { return 0x7f007f00u - in; }  // and of what goes out: the inverse, of a power of two
    // The same for outputs, which carry 2^4 besides, from the scale of queries: so Aqk is in the middle of fp16's range.
    DEVICE u32 out_of_outputs() const { return 0x7d007d00u - in; }

    // Largest magnitude of this lane's part of U.
    DEVICE static float largest(const float* u) {
        const float a = fmaxf(fmaxf(fabsf(u[0]), fabsf(u[1])), fmaxf(fabsf(u[2]), fabsf(u[3])));
        const float b = fmaxf(fmaxf(fabsf(u[4]), fabsf(u[5])), fmaxf(fabsf(u[6]), fabsf(u[7])));
        return fmaxf(a, b);
    }
    // Whether the warp's largest is within bounds, and no lane objects.
    DEVICE bool fits(float mine, bool objects) const {
        const bool high = __any_sync(kAllLanes, mine > kHigh || objects), enough = __any_sync(kAllLanes, mine >= low);
        return enough && !high;
    }
    // The factor by which everything scaled must be multiplied when it does not fit; bits: the warp's largest.
    DEVICE float adjust(u32 bits) {
        if (bits == 0u || bits >= 0x7f800000u) return 1.f;  // nothing to scale by
        const int exponent = static_cast<int>(bits >> 23) - 127;  // bring the largest to about 2^4
        float factor = __int_as_float(min(max(127 + 4 - exponent, 1), 254) << 23);
        factor = fminf(fmaxf(factor, low_bf16(out()) * (1.f / kMost)), low_bf16(out()) * kMost);
        const float scale = low_bf16(in) * factor;
        in = pack_bf16(scale, scale);
        low = scale < kMost ? kLow : 0.f;
        return factor;
    }
};

DEVICE PoolLayout pool_layout(const Params& p, u32 is_float) {
    return PoolLayout{(p.flags & is_float) != 0, (p.flags & kStateVFirst) != 0, (p.flags & kVectorStates) != 0};
}

// x += r Tinv^T for the warp's 16 rows of V: words of R as they come from the read, Tinv by its three blocks.
DEVICE void multiply_inverse(float* x, const float* r, const Pair* b) {
    mma_tf32(x + 4, r[0], r[2], r[1], r[3], b[1].x, b[1].y);
    mma_tf32(x, r[0], r[2], r[1], r[3], b[0].x, b[0].y);
    mma_tf32(x + 4, r[4], r[6], r[5], r[7], b[2].x, b[2].y);
}

// What tf32 leaves out of it, for the tokens from `first` on.
DEVICE void add_low_products(float* x, const float* r, const Pair* inverse, int first) {
    float low[8];
    Pair high[3], rest[3];
    const int token = fresh_lane() >> 2;
    auto low_part = [](float x) { return __uint_as_float(__float_as_uint(x) - kHalfTf32) - cut_tf32(x); };
#pragma unroll
    for (int j = 0; j < 3; j++) {
        const bool needed = token + (j == 0 ? 0 : 8) >= first;
        high[j] = needed ? inverse[j] : Pair{0.f, 0.f};
        rest[j] = needed ? Pair{low_part(inverse[j].x), low_part(inverse[j].y)} : Pair{0.f, 0.f};
    }
#pragma unroll
    for (int t = 0; t < 8; t++) low[t] = r[t] - cut_tf32(r[t]);
    multiply_inverse(x, low, high);
    multiply_inverse(x, r, rest);
}

// U times the low parts of the keys (layout.cuh, low_keys; `keys`: this lane's).
DEVICE void add_low_keys(float* state, const u32* u, u32 keys) {
    u32 scaled[4];
#pragma unroll
    for (int t = 0; t < 4; t++) scaled[t] = multiply_f16(u[t], 0x10001000u);  // 2^-11, twice
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const Words4 word = load_shared_words4(keys + j * 512);
        const u32 words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            mma_f16(state + 16 * j + 4 * i, scaled, __byte_perm(words[i], 0, 0x1404), __byte_perm(words[i], 0, 0x3424));
    }
}

// identity: the run makes M, whose rows start from those of the identity, with v = 0.
template <class C, bool identity>
DEVICE void run_recurrence(const Params& p, const Work& w, u32 shared, int warp_index, int lane, u32 rank, int n,
                           int base) {
    const int warpgroup = warp_index >> 2, warp = warp_index & 3, g = lane >> 2, q = lane & 3;
    const int v_half = C::kForm == Form::kPair ? rank : warpgroup;      // which 64 of V
    const int row = v_half * 64 + warp * 16 + g, column = 2 * q;
    constexpr bool kShare = C::kParts && C::kForm == Form::kWhole;
    const int warm_up = kShare ? w.warm_up : 0;  // chunks of which nothing is kept
    auto head_offset = [&]() { return static_cast<i64>(w.head) * (128 * 128); };

    float state[64];
    if constexpr (C::kForm == Form::kTransition) {
#pragma unroll
        for (int j = 0; j < 16; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                state[4 * j + e] = identity && row + (e >> 1) * 8 == column + 8 * j + (e & 1) ? 1.f : 0.f;
    } else if (w.has_initial) {
        load_state(state, p.initial, w.read_slot * p.initial_stride + head_offset(), row, column,
                   pool_layout(p, kInitialFloat));
    } else {
#pragma unroll
        for (int t = 0; t < 64; t++) state[t] = 0.f;
    }
    if constexpr (kShare) {
        // In registers from here on: the assembler would keep most of it in local memory until the first chunk, which costs
        // 4 us there. With more of it in registers the loop spills addresses.
#pragma unroll
        for (int t = 0; t < 40; t++) asm volatile("" : "+f"(state[t]));
        for (int i = 0; i < base; i++) {  // chunks of the share that are left out: prefill.cu
            barrier_wait_together(shared + C::full + 8 * i, 0);
            if (arrives(lane)) barrier_arrive(shared + C::empty + 8 * i);
        }
    }

    // The next checkpoint, and the chunk of this run that it follows, or -1. Those behind the run are left out: a table
    // that only the device knows need not be sorted.
    int checkpoint = 0, checkpoint_chunk = -1;
    auto find_checkpoint = [&](int earliest) {
        const int end = min(p.checkpoint_begin[w.segment + 1], p.checkpoints);
        checkpoint_chunk = -1;
        for (; checkpoint < end && checkpoint_chunk < 0; checkpoint += checkpoint_chunk < 0) {
            const int chunk = p.checkpoint_offset[checkpoint] / kChunk - 1 - w.first_chunk;
            checkpoint_chunk = chunk < earliest ? -1 : chunk;
        }
    };
    if (p.checkpoint_begin) {
        checkpoint = max(p.checkpoint_begin[w.segment], 0);
        find_checkpoint(warm_up);
    }

    // Lane addresses: V fragment (transposed), the small matrices, this warp's output staging, its place in `out`.
    const u32 v_row = (lane >> 4) * 8 + (lane & 7), v_piece = 2 * warp + ((lane >> 3) & 1);
    const u32 v_lane = Stage::v + (C::kForm == Form::kPair ? 0 : warpgroup) * 2048 + v_row * 128 +
                       ((v_piece ^ (v_row & 7)) << 4);
    const u32 small_lane = ((lane >> 3) & 1) * 256 + v_row * 16;
    const u32 staging = shared + C::staging_of(warp_index);
    const u32 lane_row = kept(Stage::decay + q * Stage::lane_row, lane), lane16 = kept(lane * 16, lane);
    // Of the run's first chunk; M's outputs are the rows with which those of the segment read the part's start.
    const u32 token_stride = identity ? 128 * p.value_heads : static_cast<u32>(p.out_token_stride);
    const u16* const out = (identity ? p.start_queries : p.out) + w.first_token * static_cast<i64>(token_stride) +
                           w.head * (identity ? 128 : p.out_head_stride) + v_half * 64 + warp * 16;
    const u32 out_lane = kept(v_row * 2u * token_stride + ((lane >> 3) & 1) * 16, lane);  // and of this lane

    float products[16];  // [W 8 | O' 8]
    u32 v[4] = {0, 0, 0, 0}, intra[4], marked = 0;
    float o[8];
    u32 u[4], output[4];
    Quad scale, query_scale;
    Pair inverse[3];
    // Fours of channels whose decay is loaded with the operands; the others come beside W, where registers are short,
    // most of all where warm-ups and norms take some.
    constexpr bool kRoomy = C::kForm == Form::kPair;
    constexpr int kEarly = C::kPlainPair ? 4 : kRoomy ? (C::kParts ? 6 : 8) : C::kParts || C::kNorms ? 1 : 2;
    Range range;

    // The output of a chunk leaves in steps with other work between them: transposed through this warp's staging, read
    // back as rows, 16 bytes a lane, and stored; `rows` of the 16 exist.
    Words4 row_piece;
    auto stage_output = [&](u32 tile) {  // or, for the norm, over V of its chunk: this warp's own columns
        store_matrix_transposed(C::kNorms ? tile + v_lane : small_lane + not_hoisted(staging), output);
        __syncwarp();
    };
    auto read_output = [&]() { row_piece = load_shared_words4(small_lane + not_hoisted(staging)); };
    auto write_output = [&](int chunk, int rows) {
        const u64 to = reinterpret_cast<u64>(out) + out_lane + static_cast<u64>(chunk * (2u * kChunk)) * token_stride;
        if (static_cast<int>(v_row) < rows)
            asm volatile("st.global.v4.b32 [%0],{%1,%2,%3,%4};" ::"l"(to), "r"(row_piece.x), "r"(row_piece.y),
                         "r"(row_piece.z), "r"(row_piece.w)
                         : "memory");
        __syncwarp();
    };

    // The stage of the chunk at hand and its barrier.
    int stage_index = base % C::kStages, parity = (base / C::kStages) & 1;
    u32 stage = shared + C::stages + stage_index * C::kStageBytes, full = shared + C::full + 8 * stage_index;
    Quad decay[8];
    auto load_decay = [&](int j) { return load_shared_quad(stage + lane_row + j * 16); };
    const int last_rows = w.rows - (n - 1) * kChunk;
    const u32 last_tokens[2] = {kept_tokens(2 * q, last_rows), kept_tokens(2 * q + 8, last_rows)};
    auto load_operands = [&](int i) {
        if (!identity) load_matrix_transposed(v, stage + v_lane);
        const Quad first = load_shared_quad(stage + lane16 + Stage::inverse);
        inverse[0] = Pair{first.x, first.y};
        inverse[1] = Pair{first.z, first.w};
        inverse[2] = load_shared_pair(stage + lane16 + Stage::inverse + Stage::inverse_last);
        scale = load_shared_quad(stage + lane_row + Stage::key_scale);
#pragma unroll
        for (int j = 0; j < kEarly; j++) decay[j] = load_decay(j);
        if (i == n - 1)
#pragma unroll
            for (int t = 0; t < 4; t++) v[t] &= last_tokens[t >> 1];
    };
    auto load_output_operands = [&]() {
        load_matrix(intra, stage + Stage::intra + small_lane);
        query_scale = load_shared_quad(stage + lane_row + Stage::query_scale);
    };
    // The next chunk's operands come beside the update where the pair's chain is what counts. The whole form gives its
    // stage back first: with one in hand and one awaited, only three of four groups of producers could fill theirs.
    constexpr bool kBeside = C::kForm != Form::kWhole;
    auto next_operands = [&](int i) {
        if (i >= n) return;
        barrier_wait(full, parity);
        load_operands(i);
    };
    auto scale_values = [&]() {
#pragma unroll
        for (int t = 0; t < 4; t++) v[t] = multiply_bf16(v[t], range.in);
    };
    auto exact_from = [&]() { return kChunk - static_cast<int>(marked & (Exact::kLowKeys - 1)); };  // first token
    auto front = [&](int i, bool writes, int rows) {  // writes: the output of the chunk before, `rows` of it
        const bool has_output = !C::kNorms && writes;
        u32 state_bf16[32];
#pragma unroll
        for (int t = 0; t < 32; t++) state_bf16[t] = pack_bf16(state[2 * t], state[2 * t + 1]);
        const u32 kd_qd = swizzled_tile(stage + Stage::tiles, 16);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 8; s++) {
            const u32 tile = kd_qd + ((s >> 2) * Stage::half + (s & 3) * 32) / 16;
            wgmma_n32(products, state_bf16 + 4 * s, tile, s > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        // Beside W: the decay and the output of the chunk before.
        if (has_output) read_output();
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (j >= kEarly) decay[j] = load_decay(j);
            const Quad e = decay[j];
            float* s = state + 8 * j;
            s[0] *= e.x;
            s[1] *= e.y;
            s[2] *= e.x;
            s[3] *= e.y;
            s[4] *= e.z;
            s[5] *= e.w;
            s[6] *= e.z;
            s[7] *= e.w;
        }
        marked = load_shared(stage + lane_row + Stage::exact);
        if (has_output) write_output(i - 1, rows);
        if constexpr (kRoomy) load_output_operands();
        if constexpr (!kBeside) scale_values();
        wgmma_wait<0>();
        if constexpr (!kRoomy) load_output_operands();
        float r[8], x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
        for (int t = 0; t < 4; t++) {
            r[2 * t] = fmaf(-(t < 2 ? scale.x : scale.z), products[2 * t], low_bf16(v[t]));
            r[2 * t + 1] = fmaf(-(t < 2 ? scale.y : scale.w), products[2 * t + 1], high_bf16(v[t]));
        }
        multiply_inverse(x, r, inverse);
        auto round = [&]() {
#pragma unroll
            for (int t = 0; t < 4; t++) u[t] = pack_f16(x[2 * t], x[2 * t + 1]);
        };
        round();  // while the warp agrees on the largest
#pragma unroll
        for (int t = 0; t < 8; t++) o[t] = 0.f;
        if (rarely(!range.fits(Range::largest(x), marked))) {
            const bool exact = __any_sync(kAllLanes, marked);
            if (exact) add_low_products(x, r, inverse, exact_from());
            const float largest = Range::largest(x);
            if (!range.fits(largest, false)) {
                const float factor = range.adjust(warp_max(__float_as_uint(largest)));
#pragma unroll
                for (int t = 0; t < 64; t++) state[t] *= factor;
#pragma unroll
                for (int t = 0; t < 8; t++) x[t] *= factor;
#pragma unroll
                for (int t = 8; t < 16; t++) products[t] *= factor;
            }
            round();
            if (exact) {
                u32 u_low[4];
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    const int token = 2 * (fresh_lane() & 3) + (t >> 1) * 8;
                    u_low[t] = pack_f16(token >= exact_from() ? x[2 * t] - low_f16(u[t]) : 0.f,
                                        token + 1 >= exact_from() ? x[2 * t + 1] - high_f16(u[t]) : 0.f);
                }
                mma_f16(o, u_low, intra[0], intra[1]);
                mma_f16(o + 4, u_low, intra[2], intra[3]);
                wgmma_fence();
                wgmma_f16_n128(state, u_low, swizzled_tile(stage + Stage::tiles + Stage::kr, Stage::half));
                wgmma_commit();
                wgmma_wait<0>();
                if (C::kLowKeys && __any_sync(kAllLanes, marked >= Exact::kLowKeys))
                    add_low_keys(state, u, stage + C::low_keys + fresh_lane() * 16);
            }
        }
    };
    auto back = [&](int i) {  // the next chunk
        mma_f16(o, u, intra[0], intra[1]);  // before the update: behind it, they would wait for the tensor cores
        mma_f16(o + 4, u, intra[2], intra[3]);
        const u32 kr = swizzled_tile(stage + Stage::tiles + Stage::kr, Stage::half);
        wgmma_fence();
        wgmma_f16_n128(state, u, kr);
        wgmma_commit();
        // Beside the update: the output's last steps, and in clusters the next stage.
        const u32 this_stage = stage;
        const u32 empty = full + C::empty - C::full;
        const u32 filler = stage_index & 1;
        stage += C::kStageBytes;
        full += 8;
        if (++stage_index == C::kStages) {
            stage_index = 0;
            parity ^= 1;
            stage = shared + C::stages;
            full = shared + C::full;
        }
        if constexpr (kBeside) next_operands(i);
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const Pair y = t < 2 ? Pair{query_scale.x, query_scale.y} : Pair{query_scale.z, query_scale.w};
            const float first = fmaf(y.x, products[8 + 2 * t], o[2 * t]);
            const float second = fmaf(y.y, products[9 + 2 * t], o[2 * t + 1]);
            output[t] = multiply_bf16(pack_bf16(first, second), range.out_of_outputs());
        }
        stage_output(this_stage);
        if constexpr (kBeside) scale_values();
        wgmma_wait<0>();
        if (arrives()) {
            if constexpr (C::kCluster)
                barrier_arrive_remote(empty, filler);  // the CTA that fills the stage, be it this one
            else
                barrier_arrive(empty);
        }
        if constexpr (!kBeside) next_operands(i);
    };

    next_operands(0);
    int i = 0;
    // Runs of chunks between checkpoints: the inner loop knows nothing of them.
    while (i < n) {
        const int end = checkpoint_chunk >= 0 && checkpoint_chunk < n ? checkpoint_chunk + 1 : n;
        front(i, i > 0, !kShare || i > warm_up ? kChunk : 0);
        while (true) {
            i++;
            back(i);
            if (i == end) break;
            front(i, true, !kShare || i > warm_up ? kChunk : 0);
        }
        while (checkpoint_chunk >= 0 && i == checkpoint_chunk + 1) {
            const int slot = p.checkpoint_slot[checkpoint];
            if constexpr (C::kForm == Form::kTransition)  // finished where the part's start is known: correct.cu
                store_transition(state, transition_at(p, checkpoint, w.head), identity, row, column, low_bf16(range.out()));
            else if (slot >= 0 && slot < p.checkpoint_rows)
                store_state(state, p.checkpoint_pool, slot * p.checkpoint_stride + head_offset(), row, column,
                            pool_layout(p, kCheckpointFloat), low_bf16(range.out()));
            checkpoint++;
            find_checkpoint(i - 1);
        }
    }
    if (!C::kNorms && n > warm_up) {
        read_output();
        write_output(n - 1, w.rows - (n - 1) * kChunk);
    }

    if constexpr (C::kParts) let_next_kernel_start();
    if (!w.kept) return;
    if (C::kParts)
        store_transition(state, transition_of(p, w.segment, w.part, w.head), identity, row, column, low_bf16(range.out()));
    else if (p.final_ && C::kForm != Form::kTransition)
        store_state(state, p.final_, w.write_slot * p.final_stride + head_offset(), row, column,
                    pool_layout(p, kFinalFloat), low_bf16(range.out()));
}
