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
    bool has_initial;  // the run starts from read_slot
    bool kept;         // its last state is needed
    int warm_up;       // chunks at the run's beginning that belong to the share before: they only make its start state
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

DEVICE int segment_at(const Params& p, int position) { return p.flags & kOrdered ? p.order[position] : position; }

// A head of a segment: all of its chunks.
DEVICE Work find_work(const Params& p, int n, int head) {
    Work w;
    w.segment = n;
    w.part = 0;
    w.head = head;
    // Everything is asked for before anything is used: one trip to memory instead of five.
    const bool read_64 = p.flags & kReadSlots64, write_64 = p.flags & kWriteSlots64;
    Entry read{}, write{};
    u32 starts = 1;
    const int given_first = p.first_token[n], given_length = p.length[n];
    if (p.initial && p.read_slots) read = load_entry(p.read_slots, n * p.read_stride, read_64);
    if (p.final_ && p.write_slots) write = load_entry(p.write_slots, n * p.write_stride, write_64);
    if (p.initial && p.has_initial)
        starts = p.flags & kInitialFlag32 ? static_cast<const u32*>(p.has_initial)[n * p.has_initial_stride]
                                          : static_cast<const u8*>(p.has_initial)[n * p.has_initial_stride];
    // Values that the host could not check are brought into range, so that nothing outside the tensors is touched.
    w.first_token = min(max(given_first, 0), p.tokens);
    w.rows = min(max(given_length, 0), p.tokens - w.first_token);
    w.read_slot = p.initial ? slot_of(p.read_slots, read, read_64, n, p.pad_slot, p.initial_rows) : 0;
    w.write_slot = p.final_ ? slot_of(p.write_slots, write, write_64, n, p.pad_slot, p.final_rows) : 0;
    w.has_initial = p.initial && starts != 0;
    w.kept = true;
    w.padding = w.read_slot < 0 || w.write_slot < 0;
    w.chunks = (w.rows + kChunk - 1) / kChunk;
    w.first_chunk = 0;
    w.warm_up = 0;
    return w;
}

