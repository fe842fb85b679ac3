// Chunked KDA prefill for compute capability 9.0, C = 16: one producer/consumer kernel.
//
// A CTA (or a cluster of two, see Form) takes one value head of one segment after another, or one part of one. Consumer
// warpgroups run the recurrence with the state in registers; producer warps turn raw q, k, v, g, beta of later chunks
// into its operands. Inputs are read from global memory once and outputs written once.
//
// Compiled with KDA_FORM, KDA_BOUNDED, KDA_GATE_FLOAT, KDA_CONVOLVES and KDA_NORMS defined; `launch_info` tells the
// host how to launch the result.
#include "prepare.cuh"
#include "recurrence.cuh"
#include "seams.cuh"

// A part of a segment, in one of three ways: see run_part.
constexpr bool kInParts = Form::KDA_FORM == Form::kTransition;
using Kernel = PrefillConfig<Form::KDA_FORM, KDA_BOUNDED, KDA_GATE_FLOAT, kInParts, KDA_CONVOLVES, KDA_NORMS>;
using First = PrefillConfig<Form::kPair, KDA_BOUNDED, KDA_GATE_FLOAT, true>;
using OneShare = PrefillConfig<Form::kWhole, KDA_BOUNDED, KDA_GATE_FLOAT, true>;
DEVICE constexpr int largest(int a, int b) { return a > b ? a : b; }
constexpr int kSharedBytes =
    kInParts ? largest(Kernel::kBytes, largest(First::kBytes, OneShare::kBytes)) : Kernel::kBytes;

struct LaunchInfo {
    int threads, shared_bytes, cluster;
};
extern "C" __constant__ const LaunchInfo launch_info = {
    Kernel::kThreads, kSharedBytes, Kernel::kCluster ? 2 : 1};

// Padding: output rows are zero, no state is touched.
DEVICE void write_zeros(const Params& p, const Work& w, int threads) {
    for (int x = threadIdx.x; x < w.rows * 16; x += threads) {
        u16* to = p.out + (w.first_token + (x >> 4)) * p.out_token_stride + w.head * p.out_head_stride + (x & 15) * 8;
        *reinterpret_cast<Words4*>(to) = Words4{0, 0, 0, 0};
    }
}

// `part`: the one run of this CTA, where it is a part's.
template <class C>
DEVICE void run(const Params& p, const Neighbours& b, u32 shared, Work* part) {
    const int thread = threadIdx.x, lane = thread & 31;
    // Shuffled, so that the assembler knows it is the same for the whole warp: addresses stay in uniform registers.
    const int warp_index = __shfl_sync(kAllLanes, thread >> 5, 0);
    const u32 rank = C::kCluster ? cluster_rank() : 0;
    // Each warp's own run: the roles are not always at the same one. In shared memory, read where it is needed, it
    // costs the main loops no registers.
    __shared__ Work works[C::kParts ? 1 : C::kThreads / 32];
    Work& w = C::kParts ? *part : works[warp_index];
    __shared__ Output outputs[C::kNorms ? C::kThreads / 32 : 1];  // likewise
    Output& output = outputs[C::kNorms ? warp_index : 0];
    if (C::kNorms && lane == 0) output.rows = 0;
    // The CTAs of a cluster that share by time meet once, where the consumers have the states that they start from.
    constexpr bool kShare = C::kParts && C::kForm == Form::kWhole;
    constexpr int kCtas = C::kCluster ? 2 : 1;  // of a worker
    const int workers = gridDim.x / kCtas, worker = blockIdx.x / kCtas, units = p.segments * p.value_heads;
    int place = 0;
    // The next run of this warp's role: how many chunks it has, or what else is to be done.
    constexpr int kPadding = -1, kNoMore = -2;
    auto next_run = [&]() {
        if constexpr (C::kParts) return place++ ? kNoMore : w.chunks;
        const int unit = next_unit(p, worker, workers, units, place);
        if (unit < 0) return kNoMore;
        __syncwarp();
        if (lane == 0) {
            w = find_work(p, segment_at(p, unit / p.value_heads), unit % p.value_heads);
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
        for (int i = 0; i < C::kRawBarriers; i++) barrier_init(shared + C::raw_full + 8 * i, kWarpArrivals);
        if (KDA_EVERY_LANE_ARRIVES)
            for (int i = 0; i < 2 * C::kGroups; i++) barrier_init(shared + C::handovers + 8 * i, 32);
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
        if constexpr (kShare) cluster_arrive();
        for (int base = 0, chunks; (chunks = next_run()) != kNoMore; base += max(chunks, 0)) {
            if (chunks < 0) continue;
            prepare_chunks<C>(p, w, shared, warp_index - C::kFirstProducer / 32, lane, rank, chunks, base, b, output);
        }
        if constexpr (C::kNorms)
            norm_last_output<C>(p, b, shared, warp_index - C::kFirstProducer / 32, lane, output);
        if constexpr (kShare) {
            __syncwarp();
            cluster_wait();
        }
    } else if (warp_index >= C::kConsumers / 32) {
        release_registers<C::kIdleRegisters>();
    } else {
        claim_registers<C::kConsumerRegisters>();
        for (int base = 0, chunks; (chunks = next_run()) != kNoMore; base += max(chunks, 0)) {
            if (chunks >= 0 && C::kForm == Form::kTransition && rank == 1)
                run_recurrence<C, true>(p, w, shared, warp_index, lane, rank, chunks, base);
            else if (chunks >= 0)
                run_recurrence<C, false>(p, w, shared, warp_index, lane, rank, chunks, base);
            else if (chunks == kPadding && rank == 0)
                write_zeros(p, w, C::kConsumers);
        }
    }
    if constexpr (C::kCluster) {  // neither CTA leaves while the other may still write to it
        __syncwarp();
        cluster_barrier();
    }
}

// A part of a segment, by a cluster (parts.cuh). Where all before it and all before its middle is forgotten, the two
// CTAs share it by time instead of V, each with all of V: less work in all. Else a pair runs part 0, and of any other
// part one CTA makes B and the outputs as from nothing, the other one M and what the outputs have to add (correct.cu).
DEVICE void run_part(const Params& p, const Neighbours& b, u32 shared) {
    __shared__ Work work, own;  // of the head; this CTA's run, made while other threads still read the first
    __shared__ int seams[2];
    static_assert(!kInParts || (Kernel::kThreads == Seam::threads && First::kThreads == Seam::threads &&
                                OneShare::kThreads == Seam::threads && Seam::bytes <= kSharedBytes - 1024));
    const u32 rank = cluster_rank();
    const int index = blockIdx.x / 2, head = index % p.value_heads, part = index / p.value_heads % p.parts;
    cluster_arrive();
    if (threadIdx.x == 0) work = find_work(p, segment_at(p, index / p.value_heads / p.parts), head);
    __syncthreads();
    Parts parts = parts_of(p, work.chunks, true);
    const int begin = rank ? parts.middle(part) : parts.begin(part);
    if (work.padding) {
        if (rank == 0) write_zeros(p, run_of(work, part, begin, parts.begin(part + 1), 0), Seam::threads);
        return;
    }
    const int seam = find_seam<KDA_BOUNDED, KDA_GATE_FLOAT>(p, work, begin, shared);
    cluster_wait();  // the other CTA runs
    if (threadIdx.x == 0) {
        seams[rank] = seam;
        store_remote(shared_address(seams + rank), rank ^ 1, seam);
        p.seams[seam_index(p, work.segment, 2 * part + rank, head)] = seam;
    }
    __syncwarp();
    cluster_barrier();
    if (seam == kNotWalked) parts = parts_of(p, work.chunks, false);
    if (part > parts.last()) return;
    const bool shares = by_shares(part, seams[0], seams[1]);
    if (threadIdx.x == 0) {
        const int from = parts.begin(part), to = parts.begin(part + 1);
        own = !shares ? run_of(work, part, from, to, 0)
              : rank  ? run_of(work, part, begin, to, seam)
                      : run_of(work, part, from, parts.middle(part), max(seam, 0));
        own.kept = !shares || rank == 1;
    }
    fence_async_proxy();  // the walk's reads and writes, before copies over them
    __syncthreads();
    if (shares) return run<OneShare>(p, b, shared, &own);
    if (part == 0) return run<First>(p, b, shared, &own);
    run<Kernel>(p, b, shared, &own);
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
    extern __shared__ u8 dynamic_shared[];
    const u32 shared = (shared_address(dynamic_shared) + 1023) & ~1023u;
    if (p.tokens > 0 && threadIdx.x < 4) prefetch_map(&p.q + threadIdx.x);
    if constexpr (kInParts)
        run_part(p, b, shared);
    else
        run<Kernel>(p, b, shared, nullptr);
}
