// What one CTA (or cluster) works on: a run of chunks of one segment and one value head.
#pragma once
#include "layout.cuh"
#include "params.cuh"

struct Work {
    int segment, part, head;
    int first_token;   // of the run
    int rows;          // tokens of the run
    int chunks;        // ceil(rows / 16)
    int first_chunk;   // of the run within its segment, for checkpoint offsets
    bool padding;      // a slot says that this row is padding
    bool last_part;    // the run ends its segment
    bool has_initial;  // the segment starts from read_slot
    int warm_up;       // chunks at the run's beginning that belong to the half before: they only make its start state
    bool from_zero;    // the run starts from nothing: all that came before it has been forgotten
    int read_slot, write_slot;
};

// An integer of a table as it lies there: 32 bits, or 64 in two words.
struct Entry {
    u32 low, high;
};
DEVICE Entry load_entry(const void* table, i64 index, bool is_64) {
    const u32* words = static_cast<const u32*>(table) + (index << is_64);
    return Entry{words[0], is_64 ? words[1] : 0u};
}

// A slot, or -1 where it is the padding marker or outside the pool; without a table, row n of the pool.
DEVICE int slot_of(bool table, Entry entry, bool is_64, int n, int pad, int rows) {
    const int low = static_cast<int>(entry.low);
    const i64 slot = !table ? n : is_64 ? static_cast<i64>(static_cast<u64>(entry.high) << 32 | entry.low) : low;
    return (table && slot == pad) || slot < 0 || slot >= rows ? -1 : static_cast<int>(slot);
}

// Of a head's start state, and of the transition of a part, whose M lies behind its B.
DEVICE i64 start_offset(const Params& p, const Work& w) {
    return (static_cast<i64>(w.segment) * p.value_heads + w.head) * (128 * 128);
}
DEVICE i64 transition_offset(const Params& p, const Work& w, int part) {
    return ((static_cast<i64>(w.segment) * (p.parts - 1) + part - 1) * p.value_heads + w.head) * (2 * 128 * 128);
}

// The next unit of work of a CTA (or cluster), or -1; place: where its last search ended. Where the host knows the
// lengths it says who takes what, so that all end together; else the units go round, and back.
DEVICE int next_unit(const Params& p, int worker, int workers, int units, int& place) {
    if (p.flags & kScheduled) {
        while (place < kShares && p.shares[place].workers) {
            const Share s = p.shares[place++];
            if (worker >= s.first && worker < s.first + s.workers)
                return s.segment * p.value_heads + s.head + worker - s.first;
        }
        return -1;
    }
    const int round = place++, unit = round * workers + (round & 1 ? workers - 1 - worker : worker);
    return unit < units ? unit : -1;
}

// Place in [N, 2 P, HV] of the seam before a half of a part.
DEVICE i64 seam_index(const Params& p, int segment, int half, int head) {
    return (static_cast<i64>(segment) * 2 * p.parts + half) * p.value_heads + head;
}

DEVICE int segment_at(const Params& p, int position) { return p.flags & kOrdered ? p.order[position] : position; }

// Whether a head of a segment remembers nothing across any of its seams. A warp's vote.
DEVICE bool forgets_everywhere(const Params& p, int segment, int head, int lane) {
    const int seam = lane > 0 && lane < 2 * p.parts ? p.seams[seam_index(p, segment, lane, head)] : 0;
    return __all_sync(kAllLanes, seam >= 0);
}

// First chunk of a part of a segment with a transition for each but the first and the last of its P + 1 parts. The first
// runs beside the transitions, which take a little longer than its chunks do, and then all the others run.
DEVICE int uneven_begin(int chunks, int part, int parts) {
    const int each = (8 * chunks + 8 * parts + 8) / (8 * parts + 9);
    return part == 0 ? 0 : min(max(chunks - parts * each, 0) + (part - 1) * each, chunks);
}

// Index of the work unit, a part: heads fastest; longest segments first where the host gave an order. half: 0 or 1 for
// one half of the part, which with `seams` begins where its seam says; -1 for all of it. Where there are transitions,
// whole parts are uneven ones: the first and those with transitions, or, with `later`, all but the first.
DEVICE Work find_work(const Params& p, int index, int half, bool later, bool seams = true) {
    Work w;
    w.head = index % p.value_heads;
    const int rest = index / p.value_heads;
    w.part = rest % p.parts;
    w.segment = segment_at(p, rest / p.parts);
    const int n = w.segment;
    const int begin = 2 * w.part + (half > 0), end = begin + (half < 0 ? 2 : 1);
    // Everything is asked for before anything is used: one trip to memory instead of five.
    const int all = 2 * p.parts;
    const bool uneven = p.transitions && half < 0;
    const bool read_64 = p.flags & kReadSlots64, write_64 = p.flags & kWriteSlots64;
    Entry read{}, write{};
    u32 starts = 1;
    int seam = -1;
    const int given_first = p.first_token[n], given_length = p.length[n];
    if (p.initial && p.read_slots) read = load_entry(p.read_slots, n * p.read_stride, read_64);
    if (p.final_ && p.write_slots) write = load_entry(p.write_slots, n * p.write_stride, write_64);
    if (p.initial && p.has_initial)
        starts = p.flags & kInitialFlag32 ? static_cast<const u32*>(p.has_initial)[n * p.has_initial_stride]
                                          : static_cast<const u8*>(p.has_initial)[n * p.has_initial_stride];
    if (seams && half >= 0 && begin > 0) seam = p.seams[seam_index(p, n, begin, w.head)];
    // Values that the host could not check are brought into range, so that nothing outside the tensors is touched.
    const int first_token = min(max(given_first, 0), p.tokens);
    const int length = min(max(given_length, 0), p.tokens - first_token);
    w.read_slot = p.initial ? slot_of(p.read_slots, read, read_64, n, p.pad_slot, p.initial_rows) : 0;
    w.write_slot = p.final_ ? slot_of(p.write_slots, write, write_64, n, p.pad_slot, p.final_rows) : 0;
    w.has_initial = p.initial && starts != 0;
    w.padding = w.read_slot < 0 || w.write_slot < 0;

    const int chunks = (length + kChunk - 1) / kChunk;
    const int each = (chunks + all - 1) / all;
    w.first_chunk = uneven ? uneven_begin(chunks, w.part + later, p.parts) : min(begin * each, chunks);
    const int end_chunk = uneven ? uneven_begin(chunks, w.part + later + 1, p.parts) : min(end * each, chunks);
    w.last_part = end == all && later;
    w.from_zero = seam >= 0;
    w.warm_up = min(max(seam, 0), w.first_chunk);
    w.first_chunk -= w.warm_up;
    w.chunks = end_chunk - w.first_chunk;
    w.first_token = first_token + w.first_chunk * kChunk;
    w.rows = min(length - w.first_chunk * kChunk, w.chunks * kChunk);
    return w;
}
