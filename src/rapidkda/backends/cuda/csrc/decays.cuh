// Decayed tiles of a chunk. Products within it need 2^(G_i - G_j), i >= j, of the log2 decays summed from the chunk's
// start, and get them as <x_i 2^(P_i), k_j 2^(-P_j)>, P_t the decay since an anchor, plus a shift s that centres the
// exponents, so that keys of any magnitude stay clear of both ends of the bf16 range. No anchor lies after the rows
// that use it: row i depends on tokens up to i only.
//
// Bounded gate: 16 tokens stay within 16 * 5 * log2(e) = 115.4, so one anchor serves the chunk, P_t = G_t + s.
//
// Any other: a decay below 2^-26 a token counts as 2^-26: what it multiplies is then below the resolution of fp32 sums,
// and 8 tokens span no more than 208. So each half of the chunk has an anchor of its own: 0, and at the middle A, G_7
// rounded to an integer. With P_t = G_t + s in the first half and G_t - A + s in the second,
//   within a half          <x_i 2^(P_i), k_j 2^(-P_j)>
//   rows 8.., columns ..7  <x_i 2^(P_i), k_j 2^(A - G_j)>, every true factor at most about 1, times 2^-s
// Factors between anchors are powers of two, which bf16 multiplies exactly: 2^(A + s) turns the inverse-decayed keys of
// the first half into those of the second line. Once the products are made, 2^-48 and 2^(A - 48) turn the decayed rows
// of the two halves into those that the recurrence wants, shifted by 56 as for the bounded gate: it may scale the state
// up (Range in recurrence.cuh), and a shift as large as s besides would leave the range of fp32.
//
// A lane owns four neighbouring channels, 4 (lane % 16)..., over one half of the chunk's tokens, 8 (lane / 16)...
#pragma once
#include "layout.cuh"
#include "tiles.cuh"

struct BoundedGate {
    static constexpr int anchors = 1;
    static constexpr float shift = 56.f;  // s; its powers are exact, so undoing it is too
    static constexpr float rows_unshift = 0x1p-56f;  // of kd and qd, by the scales of their rows
    static constexpr float across_unshift = 1.f;     // of products of the second half's rows with the first half's keys
};
struct UnboundedGate {
    static constexpr int anchors = 2;
    static constexpr float shift = 104.f;  // half of 8 * 26
    static constexpr float rows_unshift = 0x1p-56f;
    static constexpr float across_unshift = 0x1p-104f;
    static constexpr u32 to_rows = 0x27802780u;      // bf16, twice: 2^-48, from s to the shift of the recurrence's rows
    static constexpr u32 to_no_shift = 0x0b800b80u;  // 2^-104
};

// This lane's place in a tile of one row of 128 bytes a token: of its first row, and of row t of its eight.
DEVICE u32 lane_word(int lane) { return (lane >> 4) * 1024 + (lane & 15) * 8; }
DEVICE u32 row_word(u32 word, int t) { return t * 128 + (word ^ (t << 4)); }

// Log2 decays of this lane's channels, summed from the first of its eight tokens.
//
// In registers, with everything unrolled.
struct DecaysInRegisters {
    float x[32];  // [token][4]

    DEVICE const float* total() const { return x + 28; }
    DEVICE float at(u32, int t, int c) const { return x[4 * t + c]; }
};
// The same by loops of two turns, four tokens each, with half of the code. Registers have no index that a loop could
// count: a turn takes the first half, or makes the last one, and the other half moves there.
struct DecaysInTurns : DecaysInRegisters {};
// Or in words of shared memory that no other lane touches: two of a token's four over the gates, two where the
// inverse-decayed keys will be. Then loops over tokens take two turns, with half of the code.
struct DecaysInShared {
    static constexpr int turns = 2, tokens = 8 / turns;
    u32 gates, inverse;  // this warp's halves of both tiles
    float sum[4];        // of all tokens so far

    DEVICE const float* total() const { return sum; }
    DEVICE float at(u32 word, int t, int c) const {
        return load_shared_float((c < 2 ? gates : inverse) + row_word(word, t) + (c & 1) * 4);
    }
    DEVICE Quad load(u32 word, int t) const {
        const Pair a = load_shared_pair(gates + row_word(word, t)), b = load_shared_pair(inverse + row_word(word, t));
        return Quad{a.x, a.y, b.x, b.y};
    }
    DEVICE void put(u32 word, int t, const float* x) const {
        store_shared_pair(gates + row_word(word, t), x[0], x[1]);
        store_shared_pair(inverse + row_word(word, t), x[2], x[3]);
    }
};
// lane_word of a turn's first row.
DEVICE u32 turn_word(int lane, int turn) {
    return turn * DecaysInShared::tokens * 128 + (lane_word(lane) ^ (turn * DecaysInShared::tokens << 4));
}

// Of this lane's channels.
struct Anchors {
    float offset[4];  // P_t less the decay since the first of this lane's tokens
    float last[4];    // 2^(G_15 - anchor + s): from inverse-decayed keys to those of the update
    float end[2];     // 2^(G_15) of channels 0, 1 (lane < 16) or 2, 3
    u32 factors[2];   // bf16: 2^(A + s), or (lane >= 16) 2^(A - 48), less than 2^-133 being 0
};

// total: decays of this lane's tokens together.
template <class Gate>
DEVICE Anchors find_anchors(const float* total, int lane) {
    constexpr float kInteger = 0x1.8p23f;  // what is added to it loses its fraction
    const bool second_half = lane >= 16;
    Anchors a;
    float end[4];
    u32 across[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const float other = __shfl_xor_sync(kAllLanes, total[c], 16);
        end[c] = total[c] + other;
        if constexpr (Gate::anchors == 1) {
            a.offset[c] = second_half ? other + Gate::shift : Gate::shift;
            a.last[c] = exp2_approx(end[c] + Gate::shift);
        } else {
            const float middle = (second_half ? other : total[c]) + Gate::shift, integer = middle + kInteger;
            a.offset[c] = second_half ? middle - (integer - kInteger) + Gate::shift : Gate::shift;
            a.last[c] = exp2_approx((second_half ? total[c] : end[c]) + a.offset[c]);
            across[c] = (__float_as_uint(integer) - __float_as_uint(kInteger) + 127) << 23;  // 2^(A + s)
        }
    }
#pragma unroll
    for (int c = 0; c < 2; c++) {
        a.end[c] = exp2_approx(second_half ? end[2 + c] : end[c]);
        if constexpr (Gate::anchors == 2) {
            const u32 words = __byte_perm(across[2 * c], across[2 * c + 1], 0x7632);
            a.factors[c] = second_half ? multiply_bf16(multiply_bf16(words, Gate::to_no_shift), Gate::to_rows) : words;
        }
    }
    return a;
}

// This lane's part of the tiles, of one token. decay: summed from the first of its tokens. at: its place in a tile.
DEVICE void write_token(Words2 query, Words2 key, const float* decay, const Anchors& a, u32 inverse, u32 kd, u32 at) {
    const float k[4] = {low_bf16(key.x), high_bf16(key.x), low_bf16(key.y), high_bf16(key.y)};
    const float q[4] = {low_bf16(query.x), high_bf16(query.x), low_bf16(query.y), high_bf16(query.y)};
    float e[4], i[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const float power = decay[c] + a.offset[c];
        e[c] = exp2_approx(power);
        i[c] = k[c] * exp2_approx(-power);
    }
    store_shared_words2(kd + at, pack_bf16(k[0] * e[0], k[1] * e[1]), pack_bf16(k[2] * e[2], k[3] * e[3]));
    store_shared_words2(kd + 2048 + at, pack_bf16(q[0] * e[0], q[1] * e[1]), pack_bf16(q[2] * e[2], q[3] * e[3]));
    store_shared_words2(inverse + at, pack_bf16(i[0], i[1]), pack_bf16(i[2], i[3]));
    store_shared_words2(kd + Stage::kr + at, pack_f16(i[0] * a.last[0], i[1] * a.last[1]),
                        pack_f16(i[2] * a.last[2], i[3] * a.last[3]));
}
// Of all its tokens. raw_queries, ..., kd: this warp's half of the channels. With two anchors, `multiply_own` finishes
// kd and qd.
DEVICE void write_decayed(const DecaysInRegisters& decays, const Anchors& a, u32 raw_queries, u32 raw_keys, u32 inverse,
                          u32 kd, int lane) {
    const u32 word = lane_word(lane);
    Words2 queries[2], keys[2];
#pragma unroll
    for (int t = 0; t < 2; t++) {
        queries[t] = load_shared_words2(raw_queries + row_word(word, t));
        keys[t] = load_shared_words2(raw_keys + row_word(word, t));
    }
#pragma unroll
    for (int t = 0; t < 8; t++) {
        const Words2 key = keys[t & 1], query = queries[t & 1];
        if (t < 6) {
            queries[t & 1] = load_shared_words2(raw_queries + row_word(word, t + 2));
            keys[t & 1] = load_shared_words2(raw_keys + row_word(word, t + 2));
        }
        write_token(query, key, decays.x + 4 * t, a, inverse, kd, row_word(word, t));
    }
}
DEVICE void write_decayed(DecaysInTurns& decays, const Anchors& a, u32 raw_queries, u32 raw_keys, u32 inverse, u32 kd,
                          int lane) {
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
        const u32 word = turn_word(lane, turn);
        Words2 queries[4], keys[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            queries[t] = load_shared_words2(raw_queries + row_word(word, t));
            keys[t] = load_shared_words2(raw_keys + row_word(word, t));
        }
#pragma unroll
        for (int t = 0; t < 4; t++)
            write_token(queries[t], keys[t], decays.x + 4 * t, a, inverse, kd, row_word(word, t));
#pragma unroll
        for (int t = 0; t < 16; t++) decays.x[t] = decays.x[16 + t];
    }
}
DEVICE void write_decayed(const DecaysInShared& decays, const Anchors& a, u32 raw_queries, u32 raw_keys, u32 inverse,
                          u32 kd, int lane) {
    constexpr int kTokens = DecaysInShared::tokens;
#pragma unroll 1
    for (int turn = 0; turn < DecaysInShared::turns; turn++) {
        const u32 word = turn_word(lane, turn);
        Words2 queries[kTokens], keys[kTokens];
        Quad sums[kTokens];
#pragma unroll
        for (int t = 0; t < kTokens; t++) {
            queries[t] = load_shared_words2(raw_queries + row_word(word, t));
            keys[t] = load_shared_words2(raw_keys + row_word(word, t));
            sums[t] = decays.load(word, t);
        }
#pragma unroll
        for (int t = 0; t < kTokens; t++) {
            const float decay[4] = {sums[t].x, sums[t].y, sums[t].z, sums[t].w};
            write_token(queries[t], keys[t], decay, a, inverse, kd, row_word(word, t));
        }
    }
}

// What fp16 leaves of this lane's keys of the update, for consumers that add it up (layout.cuh, low_keys). The keys are
// made again from the raw ones, and from decays that must still be there.
template <class Decays>
DEVICE void write_low_keys(const Decays& decays, const Anchors& a, u32 raw_keys, u32 low_keys, int warp, int lane) {
    const u32 word = lane_word(lane);
    // Channels 64 warp + 4 (lane % 16) + c: n-tile 8 warp + (lane % 16) / 2, its row 4 (lane % 2) + c.
    const int tile = 8 * warp + ((lane & 15) >> 1);
    const u32 to = low_keys + (tile >> 2) * 512 + (lane & 1) * 256 + (tile & 3) * 4 + (lane >> 4) * 2;
#pragma unroll
    for (int t = 0; t < 8; t += 2) {
        float low[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const Words2 key = load_shared_words2(raw_keys + row_word(word, t + i));
            const float k[4] = {low_bf16(key.x), high_bf16(key.x), low_bf16(key.y), high_bf16(key.y)};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float x = k[c] * exp2_approx(-(decays.at(word, t + i, c) + a.offset[c])) * a.last[c];
                low[i][c] = (x - low_f16(pack_f16(x, 0.f))) * 0x1p11f;
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) store_shared_upper_bytes(to + c * 64 + t * 8, pack_f16(low[0][c], low[1][c]));
    }
}
