// The convolution histories that a step leaves, after a prefill kernel that convolves: the newest three inputs of every
// segment, and those before each checkpoint. A launch of its own, because every head of a segment must have read the old
// history first, and pools are updated in place.
#include "neighbours.cuh"

struct LaunchInfo {
    int threads, shared_bytes, cluster;
};
extern "C" __constant__ const LaunchInfo launch_info = {256, 0, 1};

// Grid: (blocks of 256 channels, segments).
extern "C" __global__ void __launch_bounds__(256)
    history(const __grid_constant__ Params p, const __grid_constant__ Neighbours b) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const int n = blockIdx.y, channel = blockIdx.x * 256 + threadIdx.x;
    const int first = min(max(p.first_token[n], 0), p.tokens), length = min(max(p.length[n], 0), p.tokens - first);
    const int from = b.conv_pool ? history_slot(p, b, n) : 0;
    // Without any pool no segment is padding, and histories are exported all the same.
    const int to = b.conv_pool || p.final_ ? table_slot(p.write_slots, p.write_stride, p.flags & kWriteSlots64, n,
                                                        p.pad_slot, b.conv_pool ? b.conv_rows : p.final_rows)
                                           : 0;
    if (channel >= conv_channels(p) || from < 0 || to < 0) return;
    const u16* x = b.conv_x + first * b.conv_x_stride + channel;
    if (b.conv_pool) {
        u16* pool = b.conv_pool + channel * b.conv_channel_stride;
        const bool kept = has_history(p, b, n);
        const i64 old = from * b.conv_slot_stride + history_offset(b, n) * b.conv_entry_stride;
        u16 newest[3];
#pragma unroll
        for (int entry = 0; entry < 3; entry++) {
            const int token = length - 3 + entry;
            newest[entry] = token >= 0 ? x[token * b.conv_x_stride]
                            : kept     ? pool[old + (entry + length) * b.conv_entry_stride]
                                       : static_cast<u16>(0);
        }
#pragma unroll
        for (int entry = 0; entry < 3; entry++)
            pool[to * b.conv_slot_stride + entry * b.conv_entry_stride] = newest[entry];
    }
    if (!b.conv_checkpoint_pool) return;
    u16* pool = b.conv_checkpoint_pool + channel * b.conv_channel_stride;
    const int end = min(p.checkpoint_begin[n + 1], p.checkpoints);
    for (int i = max(p.checkpoint_begin[n], 0); i < end; i++) {
        const int at = p.checkpoint_offset[i], slot = p.checkpoint_slot[i];
        if (at < 3 || at > length || slot < 0 || slot >= b.conv_checkpoint_rows) continue;
        for (int entry = 0; entry < 3; entry++)
            pool[slot * b.conv_checkpoint_stride + entry * b.conv_entry_stride] = x[(at - 3 + entry) * b.conv_x_stride];
    }
}
