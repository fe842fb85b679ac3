// What a CTA of replay.cu works on: requests as the tables have them, heads in turn, turns of a request.
#pragma once
#include "replay_layout.cuh"

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
