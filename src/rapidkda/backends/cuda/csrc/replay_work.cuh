// What a CTA of replay.cu works on: requests as the tables have them, the list of its heads, turns of a head.
#pragma once
#include "replay_layout.cuh"

struct Request {
    Tokens tokens;
    int slot;      // row of the pool, -1: padding
    int accepted;  // records of the last step that count
    bool busy;     // else nothing to do but zeros for padding
};

// kEarly: by tables that may be another step's.
template <bool kEarly = false>
DEVICE Request read_request(const StepParams& p, int n) {
    const Words2 slot = load_index<kEarly>(p.slots, n * p.slot_stride, p.flags & kSlots64);
    const Words2 accepted = load_index<kEarly>(p.accepted, n * p.accepted_stride, p.flags & kAccepted64);
    int first = 0, length = 0;
    if (p.q) {
        first = load_int<kEarly>(p.first_token + n * p.first_stride);
        length = load_int<kEarly>(p.length + n * p.length_stride);
    }
    Request r;
    r.accepted = accepted_count(p, widen_index(accepted, p.flags & kAccepted64));
    r.tokens = segment_tokens(p, first, length);
    r.slot = pool_row(p, widen_index(slot, p.flags & kSlots64));
    r.busy = r.slot >= 0 && (p.q ? r.tokens.count : r.accepted) > 0;
    return r;
}

DEVICE int key_head(const StepParams& p, int head) { return p.group == 1 ? head : head / p.group; }

// One head of one request.
struct Work {
    int slot = -1, head = 0;  // slot -1: there is no more
    int taken = 0, base = 0;  // records to apply; the row of the first new one. The state is stored where they differ.
    Tokens tokens = {0, 0};
};

template <bool kEarly = false>
DEVICE Work make_work(const StepParams& p, const Request& r, int head) {
    int taken = r.accepted;
    if (kDeferred && r.accepted > 0) {
        const int before = load_int<kEarly>(p.held + static_cast<i64>(r.slot) * p.value_heads + head);
        taken = min(taken + min(max(before, 0), p.positions), p.positions);
    }
    const bool fits = kDeferred && p.q && taken + r.tokens.count <= p.positions;
    return Work{r.slot, head, taken, fits ? taken : 0, r.tokens};
}

// The heads of a CTA that have something to do, in a ring in shared memory. They are every gridDim.x-th of all, so that
// all CTAs together read and write memory in order.
struct List {
    u32 at;
    DEVICE u32 place(int i) const { return at + i % kWorks * kWorkBytes; }
    DEVICE void put(int i, const Work& w) const {
        store_shared_words4(place(i), Words4{static_cast<u32>(w.slot), static_cast<u32>(w.head),
                                             static_cast<u32>(w.taken), static_cast<u32>(w.tokens.first)});
        store_shared_words2(place(i) + 16, w.tokens.count, w.base);
    }
    DEVICE Work operator[](int i) const {
        const Words4 x = load_shared_words4(place(i));
        const Words2 y = load_shared_words2(place(i) + 16);
        return Work{static_cast<int>(x.x), static_cast<int>(x.y), static_cast<int>(x.z),
                    kDeferred ? static_cast<int>(y.y) : 0, Tokens{static_cast<int>(x.w), static_cast<int>(y.x)}};
    }
};

// Fills the list; a warp's, which looks at a head a lane. Padding rows get their zeros on the way.
struct Finder {
    int head = 0, end = 0;  // of the CTA's heads, the next to look at; of the list
    bool done = false;

    // Until the list reaches kAhead heads past the one that is worked on, or has its end.
    DEVICE void find(const StepParams& p, const List& list, int place, int lane) {
        while (!done && end - place < kAhead) {
            const int at = blockIdx.x + (head + lane) * gridDim.x, heads = p.segments * p.value_heads;
            Work w;
            bool padding = false;
            if (at < heads) {
                const int n = at / p.value_heads;
                const Request r = read_request(p, n);
                w.head = at - n * p.value_heads, w.tokens = r.tokens;
                padding = r.slot < 0 && r.tokens.count > 0;
                if (r.busy) w = make_work(p, r, w.head);
            }
            const u32 busy = __ballot_sync(kAllLanes, w.slot >= 0);
            if (w.slot >= 0) list.put(end + __popc(busy & ((1u << lane) - 1)), w);
            for (u32 rows = __ballot_sync(kAllLanes, padding); rows; rows &= rows - 1) {
                const int from = __ffs(rows) - 1, zero_head = __shfl_sync(kAllLanes, w.head, from);
                const int first = __shfl_sync(kAllLanes, w.tokens.first, from);
                const int count = __shfl_sync(kAllLanes, w.tokens.count, from);
                for (int i = 0; i < 4 * count; i++) store_output(p, first + i / 4, zero_head, i % 4 * 32 + lane, 0.f);
            }
            end += __popc(busy), head += 32;
            done = static_cast<int>(blockIdx.x + head * gridDim.x) >= heads;
            if (done && lane < kEnds) list.put(end + lane, Work{});
        }
        __syncwarp();
    }
};

// A turn applies records and then runs tokens. The last turn that applies those of steps before runs the first chunk;
// each one after that applies the chunk before, from its new records, and runs the next.
struct Turn {
    int record, folds;  // first record, how many
    int token, tokens;  // first token of the segment, how many
    bool stores;        // the state is the one to keep
    bool apart;         // the state stays as it is: what records add to it is added to the products
};

DEVICE int parts(int count, int size) { return (count + size - 1) / size; }
DEVICE int count_turns(const Work& w) {
    return kManyTurns ? max(parts(w.taken, kFolds), 1) + max(parts(w.tokens.count, kTokens), 1) - 1 : 1;
}
DEVICE Turn find_turn(const Work& w, int index) {
    const int before = kManyTurns ? max(parts(w.taken, kFolds), 1) - 1 : 0;  // turns that only fold
    const int chunk = index - before;
    Turn t;
    t.record = chunk <= 0 ? index * kFolds : w.base + (chunk - 1) * kTokens;
    t.folds = chunk <= 0 ? min(w.taken - t.record, kFolds) : kTokens;
    t.token = max(chunk, 0) * kTokens;
    t.tokens = chunk < 0 ? 0 : min(w.tokens.count - t.token, kTokens);
    t.stores = chunk == 0 && w.taken > w.base;
    t.apart = kDeferred && !kManyTurns && !t.stores;
    return t;
}
