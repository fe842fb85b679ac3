// Chunked KDA prefill for compute capability 9.0, C = 16: one producer/consumer kernel, no workspace.
//
// A CTA (or a cluster of two, see Form) takes one value head of one segment, or a part of it, after another. Consumer
// warpgroups run the recurrence with the state in registers; producer warps turn raw q, k, v, g, beta of later chunks
// into its operands. Inputs are read from global memory once and outputs written once.
//
// Compiled with KDA_FORM, KDA_BOUNDED, KDA_GATE_FLOAT, KDA_CONVOLVES and KDA_NORMS defined; `launch_info` tells the
// host how to launch the result.
#include "prepare.cuh"
#include "recurrence.cuh"

using Kernel =
    PrefillConfig<Form::KDA_FORM, KDA_BOUNDED, KDA_GATE_FLOAT, KDA_PARTS, KDA_CONVOLVES, KDA_NORMS>;
// Where a head forgets at every seam, the two CTAs of a cluster share a part by time instead of V: less work in all.
constexpr bool kEitherWay = Kernel::kForm == Form::kPair && KDA_PARTS;
using Half = PrefillConfig<Form::kWhole, KDA_BOUNDED, KDA_GATE_FLOAT, true>;
// Beside the transitions of the other parts, a pair runs the first one.
constexpr bool kTransitions = Kernel::kForm == Form::kTransition;
using First = PrefillConfig<Form::kPair, KDA_BOUNDED, KDA_GATE_FLOAT, true>;
constexpr int kSharedBytes = kEitherWay && Half::kBytes > Kernel::kBytes     ? Half::kBytes
                             : kTransitions && First::kBytes > Kernel::kBytes ? First::kBytes
                                                                              : Kernel::kBytes;

struct LaunchInfo {
    int threads, shared_bytes, cluster;
};
extern "C" __constant__ const LaunchInfo launch_info = {
    Kernel::kThreads, kSharedBytes, Kernel::kCluster ? 2 : 1};

// Padding: output rows are zero, no state is touched.
template <class C>
DEVICE void write_zeros(const Params& p, const Work& w, u32 rank) {
    if (rank != 0) return;
    for (int x = threadIdx.x; x < w.rows * 16; x += C::kConsumers) {
        u16* to = p.out + (w.first_token + (x >> 4)) * p.out_token_stride + w.head * p.out_head_stride + (x & 15) * 8;
        *reinterpret_cast<Words4*>(to) = Words4{0, 0, 0, 0};
    }
}

template <class C>
DEVICE void run(const Params& p, const Neighbours& b) {
    extern __shared__ u8 dynamic_shared[];
    const u32 shared = (shared_address(dynamic_shared) + 1023) & ~1023u;
    const int thread = threadIdx.x, lane = thread & 31;
    // Shuffled, so that the assembler knows it is the same for the whole warp: addresses stay in uniform registers.
    const int warp_index = __shfl_sync(kAllLanes, thread >> 5, 0);
    constexpr bool kHalf = C::kForm == Form::kWhole && C::kParts;
    const u32 rank = C::kCluster ? cluster_rank() : 0;
    const int half = kHalf ? static_cast<int>(cluster_rank()) : -1;
    const int units = p.segments * p.value_heads * p.parts;
    // Each warp's own run: the roles are not always at the same one. In shared memory, read where it is needed, it
    // costs the main loops no registers.
    __shared__ Work works[C::kThreads / 32];
    Work& w = works[warp_index];
    __shared__ Output outputs[C::kNorms ? C::kThreads / 32 : 1];  // likewise
    Output& output = outputs[C::kNorms ? warp_index : 0];
    if (C::kNorms && lane == 0) output.rows = 0;
    constexpr int kCtas = Kernel::kCluster ? 2 : 1;  // of a worker
    const int workers = gridDim.x / kCtas, worker = blockIdx.x / kCtas;
    int place = 0;
    // The next run of this warp's role: how many chunks it has, or what else is to be done.
    constexpr int kPadding = -1, kNoMore = -2;
    auto next_run = [&]() {
        const int unit = next_unit(p, worker, workers, units, place);
        if (unit < 0) return kNoMore;
        __syncwarp();
        if (lane == 0) {
            w = find_work(p, unit, half, !kTransitions);
            if (C::kConvolves && b.conv_pool) w.padding |= history_slot(p, b, w.segment) < 0;
        }
        __syncwarp();
        return __shfl_sync(kAllLanes, w.padding ? kPadding : w.chunks, 0);
    };
    if (thread == 0) {
        for (int i = 0; i < C::kStages; i++) {
            const bool from_peer = C::kCluster && (i & 1) != rank;
            barrier_init(shared + C::full + 8 * i, from_peer ? 1 : !C::kConvolves + 2 * kWarpArrivals);
            barrier_init(shared + C::empty + 8 * i, C::kWarpgroups * 4 * kWarpArrivals * (C::kCluster ? 2 : 1));
        }
        for (int i = 0; i < C::kSlots; i++) barrier_init(shared + C::raw_full + 8 * i, kWarpArrivals);
        if constexpr (C::kNorms)
            for (int i = 0; i < C::kGroups; i++) barrier_init(shared + C::z_full + 8 * i, 1);
        barrier_init_fence();
        fence_async_proxy();
    }
    if (C::kNorms && thread < 128) store_shared_float(shared + C::norm_weight + thread * 4, b.norm_weight[thread]);
    __syncthreads();
    if constexpr (C::kCluster) cluster_barrier();

    if (warp_index >= C::kFirstProducer / 32) {
        release_registers<C::kProducerRegisters>();
        for (int base = 0, chunks; (chunks = next_run()) != kNoMore; base += max(chunks, 0)) {
            if (chunks < 0) continue;
            if (C::kOutputs && w.has_initial && !p.starts)  // the consumers will want it when they come here
                prefetch_state(p.initial, w.read_slot * p.initial_stride + static_cast<i64>(w.head) * (128 * 128),
                               p.flags & kInitialFloat, thread - C::kFirstProducer, C::kThreads - C::kFirstProducer);
            prepare_chunks<C>(p, w, shared, warp_index - C::kFirstProducer / 32, lane, rank, chunks, base, b, output);
        }
        if constexpr (C::kNorms)
            norm_last_output<C>(p, b, shared, warp_index - C::kFirstProducer / 32, lane, output);
    } else if (warp_index >= C::kConsumers / 32) {
        release_registers<C::kIdleRegisters>();
    } else {
        claim_registers<C::kConsumerRegisters>();
        for (int base = 0, chunks; (chunks = next_run()) != kNoMore; base += max(chunks, 0)) {
            if (chunks >= 0)
                run_recurrence<C, kTransitions>(p, w, shared, warp_index, lane, rank, chunks, base);
            else if (C::kOutputs && chunks == kPadding)
                write_zeros<C>(p, w, rank);
        }
    }
    if constexpr (C::kCluster) {  // neither CTA leaves while the other may still write to it
        __syncwarp();
        cluster_barrier();
    }
}

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1)
#if KDA_CLUSTER
    __cluster_dims__(2, 1, 1)
#endif
#if KDA_CONVOLVES || KDA_NORMS
    prefill(const __grid_constant__ Params p, const __grid_constant__ Neighbours b) {
#else
    prefill(const __grid_constant__ Params p) {
    constexpr Neighbours b{};
#endif
    if (p.tokens > 0 && threadIdx.x < 4) prefetch_map(&p.q + threadIdx.x);
    if constexpr (kTransitions || kEitherWay) {
        const int index = blockIdx.x / 2, part = index / p.value_heads % p.parts;
        const int segment = segment_at(p, index / p.value_heads / p.parts);
        const bool forgets = forgets_everywhere(p, segment, index % p.value_heads, fresh_lane());
        if (kTransitions && forgets) return;
        if (kTransitions && part == 0) return run<First>(p, b);
        if (kEitherWay && forgets) return run<Half>(p, b);
    }
    run<Kernel>(p, b);
}
