// The second argument of the kernels that take on a layer's convolution or gated norm. Its host twin is
// host/neighbours.py, which packs the same fields in this order.
#pragma once
#include "work.cuh"

enum NeighbourFlags : u32 {
    kConvReadSlots64 = 1u << 0,   // int64 slots, else int32
    kConvAccepted64 = 1u << 1,
};

struct Neighbours {
    i64 conv_x_stride;             // elements between tokens
    i64 conv_slot_stride, conv_entry_stride, conv_channel_stride;
    i64 conv_checkpoint_stride;    // between slots; within one, checkpoints lie as the pool does
    i64 conv_read_stride, conv_accepted_stride;
    int conv_rows, conv_checkpoint_rows;
    int conv_offsets;              // entries at which a history may start
    u32 flags;
    float norm_eps;
    TensorMap q_before, k_before, v_before;  // tiles of three tokens of one head
    TensorMap z;                   // tiles of 16 tokens
    const u16* conv_x;             // [T, C] bf16, C = (2 H + HV) 128: q | k | v before the convolution
    const float* conv_weight;      // [C, 4]
    u16* conv_pool;                // bf16 histories of three tokens or more, or null: zeros
    u16* conv_checkpoint_pool;     // bf16, or null
    const void* conv_read_slots;   // [N] or null: row n
    const void* conv_accepted;     // [N]: a history starts at entry accepted - 1; or null: at entry 0
    const float* norm_weight;      // [128]
};

static_assert(sizeof(Neighbours) == 704, "host/neighbours.py packs this layout");

// Channels of [q | k | v].
DEVICE int conv_channels(const Params& p) { return 128 * (2 * (p.value_heads / p.group) + p.value_heads); }

// Row n of a table of slots, as slot_of.
DEVICE int table_slot(const void* table, i64 stride, bool is_64, int n, int pad, int rows) {
    return slot_of(table, table ? load_entry(table, n * stride, is_64) : Entry{}, is_64, n, pad, rows);
}

// Where segment n's history lies: its slot, or -1 for padding; the entry it starts at; whether there is one.
DEVICE int history_slot(const Params& p, const Neighbours& b, int n) {
    return table_slot(b.conv_read_slots, b.conv_read_stride, b.flags & kConvReadSlots64, n, p.pad_slot, b.conv_rows);
}
DEVICE int history_offset(const Neighbours& b, int n) {
    if (!b.conv_accepted) return 0;
    const bool is_64 = b.flags & kConvAccepted64;
    const Entry entry = load_entry(b.conv_accepted, n * b.conv_accepted_stride, is_64);
    const i64 accepted =
        is_64 ? static_cast<i64>(static_cast<u64>(entry.high) << 32 | entry.low) : static_cast<int>(entry.low);
    return static_cast<int>(accepted < 1 ? 1 : accepted > b.conv_offsets ? b.conv_offsets : accepted) - 1;
}
DEVICE bool has_history(const Params& p, const Neighbours& b, int n) {
    if (!b.conv_pool || !p.has_initial) return b.conv_pool != nullptr;
    return p.flags & kInitialFlag32 ? static_cast<const int*>(p.has_initial)[n * p.has_initial_stride] != 0
                                    : static_cast<const u8*>(p.has_initial)[n * p.has_initial_stride] != 0;
}
