// Parts of a head of a segment: where they begin, what each of them leaves in memory, and where that lies.
//
// Part 0 starts from the segment's own state and leaves its last one. Any other part leaves how it changes a state,
// S -> S M + B, and, for each of its tokens, the row with which an output reads the state that the part starts from.
// Where a head has forgotten all before a part and all before its middle, there is no M: B is the part's last state.
// What has been forgotten is found out by walks back from seams, the beginnings of halves of parts (seams.cuh).
#pragma once
#include "work.cuh"

constexpr int kMatrix = 128 * 128;
constexpr int kTransition = 2 * kMatrix;  // words of B, a state in fp32, and of M (transition.cuh) behind it

// A seam is the number of chunks after which all is forgotten, or one of these.
constexpr int kRemembers = -1, kNotWalked = -2;  // not walked: nowhere in this head

struct Parts {
    int chunks, first, each;  // of the head; of part 0; of any other part, as far as there are any
    int first_half, half;     // where a head is walked: of part 0; of any other part

    DEVICE int begin(int part) const { return min(part ? first + (part - 1) * each : 0, chunks); }
    // Of walked heads.
    DEVICE int middle(int part) const { return min(begin(part) + (part ? half : first_half), chunks); }
    DEVICE int part_of(int chunk) const { return chunk < first ? 0 : (chunk - first) / each + 1; }
    DEVICE int last() const { return chunks ? part_of(chunks - 1) : 0; }
};

constexpr int kWarmUp = 4, kStored = 2;  // chunks that a share takes longer for its warm-up, and for storing a state
// Where a head is walked, halves that take equally long, or equal ones where they are short. Else a part 0 half as long
// again as the others: its pair is as much faster than the transitions.
DEVICE Parts parts_of(const Params& p, int chunks, bool walked) {
    if (walked) {
        const int share = (chunks + (2 * p.parts - 1) * kWarmUp + p.parts * kStored + 2 * p.parts - 1) / (2 * p.parts);
        if (share >= 2 * (kWarmUp + kStored)) {
            const int second = share - kWarmUp - kStored;
            return Parts{chunks, share + second, share - kWarmUp + second, share, share - kWarmUp};
        }
        const int each = (chunks + 2 * p.parts - 1) / (2 * p.parts) * 2;
        return Parts{chunks, each, each, each / 2, each / 2};
    }
    const int each = (2 * chunks + 2 * p.parts) / (2 * p.parts + 1);
    return Parts{chunks, max(chunks - (p.parts - 1) * each, each), each, 0, 0};
}

// The run of chunks begin..end of a head's, the first `warm_up` of which only make a state.
DEVICE Work run_of(Work w, int part, int begin, int end, int warm_up) {
    begin -= warm_up;
    w.part = part;
    w.warm_up = warm_up;
    w.has_initial = w.has_initial && begin == 0;
    w.first_token += begin * kChunk;
    w.first_chunk = begin;
    w.chunks = end - begin;
    w.rows = max(min(w.rows - begin * kChunk, w.chunks * kChunk), 0);
    return w;
}

// Place in [N, 2 P, HV] of the seam before a half.
DEVICE i64 seam_index(const Params& p, int segment, int half, int head) {
    return (static_cast<i64>(segment) * 2 * p.parts + half) * p.value_heads + head;
}
// Whether a part of a head is made by shares of its tokens, given the seams before its two halves.
DEVICE bool by_shares(int part, int first, int second) { return (part == 0 || first >= 0) && second >= 0; }

// What a part leaves, and what it leaves at a checkpoint.
DEVICE float* transition_of(const Params& p, int segment, int part, int head) {
    return p.transitions + ((static_cast<i64>(segment) * p.parts + part) * p.value_heads + head) * kTransition;
}
DEVICE float* transition_at(const Params& p, int checkpoint, int head) {
    const i64 parts = static_cast<i64>(p.segments) * p.parts;
    return p.transitions + ((parts + checkpoint) * p.value_heads + head) * kTransition;
}
