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
    int warm_up;       // chunks at the run's beginning that belong to the part before: they only make its start state
    bool from_zero;    // the run starts from nothing: all that came before it has been forgotten
    bool hands_over;   // the next part needs this one's last state
    int read_slot, write_slot;
};

DEVICE i64 load_int(const void* base, i64 index, bool is_64) {
    return is_64 ? static_cast<const i64*>(base)[index] : static_cast<i64>(static_cast<const int*>(base)[index]);
}

// A slot of segment n, or -1 where it is the padding marker or outside the pool.
DEVICE int slot_of(const void* slots, i64 stride, bool is_64, int n, int pad, int rows) {
    const i64 slot = slots ? load_int(slots, n * stride, is_64) : n;
    return (slots && slot == pad) || slot < 0 || slot >= rows ? -1 : static_cast<int>(slot);
}

// Place of a part in [N, P, HV].
DEVICE i64 part_index(const Params& p, const Work& w, int part) {
    return (static_cast<i64>(w.segment) * p.parts + part) * p.value_heads + w.head;
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

// Index of the work unit, heads fastest; longest segments first where the host gave an order. `parts` of each segment.
// With `seams` the run of a part begins where its seam says.
DEVICE Work find_work(const Params& p, int index, int parts, bool seams = true) {
    Work w;
    w.head = index % p.value_heads;
    const int rest = index / p.value_heads;
    w.part = rest % parts;
    const int position = rest / parts;
    w.segment = p.flags & kOrdered ? p.order[position] : position;
    const int n = w.segment;
    // Values that the host could not check are brought into range, so that nothing outside the tensors is touched.
    const int first = min(max(p.first_token[n], 0), p.tokens);
    const int length = min(max(p.length[n], 0), p.tokens - first);
    w.read_slot =
        p.initial ? slot_of(p.read_slots, p.read_stride, p.flags & kReadSlots64, n, p.pad_slot, p.initial_rows) : 0;
    w.write_slot =
        p.final_ ? slot_of(p.write_slots, p.write_stride, p.flags & kWriteSlots64, n, p.pad_slot, p.final_rows) : 0;
    w.has_initial = p.initial != nullptr;
    if (w.has_initial && p.has_initial)
        w.has_initial = p.flags & kInitialFlag32 ? static_cast<const int*>(p.has_initial)[n * p.has_initial_stride] != 0
                                                 : static_cast<const u8*>(p.has_initial)[n * p.has_initial_stride] != 0;
    w.padding = w.read_slot < 0 || w.write_slot < 0;

    const int chunks = (length + kChunk - 1) / kChunk;
    const int each = (chunks + p.parts - 1) / p.parts;
    w.first_chunk = min(w.part * each, chunks);
    const int end_chunk = min(w.first_chunk + each, chunks);
    w.last_part = w.part == p.parts - 1;
    const bool cut = seams && p.seams;
    const int seam = cut && w.part > 0 ? p.seams[part_index(p, w, w.part)] : -1;
    w.from_zero = seam >= 0;
    w.warm_up = min(max(seam, 0), w.first_chunk);
    w.hands_over = cut && !w.last_part && p.seams[part_index(p, w, w.part + 1)] < 0;
    w.first_chunk -= w.warm_up;
    w.chunks = end_chunk - w.first_chunk;
    w.first_token = first + w.first_chunk * kChunk;
    w.rows = min(length - w.first_chunk * kChunk, w.chunks * kChunk);
    return w;
}
