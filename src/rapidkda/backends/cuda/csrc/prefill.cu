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
// Beside a share's first chunks, whose raw tiles take the first slots, its seam is looked for behind all that they need;
// where gates are fp32, that has room for one of two chunks, and the other one takes the slots left.
constexpr int kSpeculated = OneShare::kGroups;
// Chunks that a share's warm-up takes at most, nearly always; with more, producers begin again.
constexpr int kGuess = 5;
using SeamWalk = Walk<KDA_GATE_FLOAT>;
constexpr int kBehind = (OneShare::kBytes - 1024 + 1023) / 1024 * 1024;
constexpr int kWalk = KDA_GATE_FLOAT ? OneShare::raw + kSpeculated * OneShare::kRaw : kBehind;
constexpr int kWalkStride = KDA_GATE_FLOAT ? kBehind - kWalk : SeamWalk::chunk_bytes;
constexpr int kWalkAhead = OneShare::raw + kSpeculated * OneShare::kRaw;  // slots that those chunks do not take
static_assert(KDA_GATE_FLOAT || OneShare::kSlots >= kSpeculated + Seam::batch);
constexpr int kWalkEnd = kWalk + (Seam::batch - 1) * kWalkStride + SeamWalk::chunk_bytes;
static_assert(!KDA_GATE_FLOAT || (Seam::batch == 2 && kWalk + SeamWalk::chunk_bytes <=
                                                          OneShare::raw + OneShare::kSlots * OneShare::kRaw));
static_assert(OneShare::raw % 1024 == 0 && OneShare::kRaw % 1024 == 0);  // tiles of the walk too
constexpr int kPartBytes =
    largest(largest(Kernel::kBytes, First::kBytes), largest(OneShare::kBytes, kWalkEnd + 1024));
static_assert(!kInParts || kPartBytes <= 232448 - 1024);
constexpr int kSharedBytes = kInParts ? kPartBytes : Kernel::kBytes;

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

// All barriers between the roles, and how many arrivals each waits for (prepare.cuh). One thread.
template <class C>
DEVICE void init_barriers(u32 shared, u32 rank) {
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
}
// They are done with: their memory may hold others.
template <class C>
DEVICE void end_barriers(u32 shared) {
    static_assert(!C::kNorms);
    for (int i = 0; i < C::kStages; i++) {
        barrier_end(shared + C::full + 8 * i);
        barrier_end(shared + C::empty + 8 * i);
    }
    for (int i = 0; i < C::kRawBarriers; i++) barrier_end(shared + C::raw_full + 8 * i);
    if (KDA_EVERY_LANE_ARRIVES)
        for (int i = 0; i < 2 * C::kGroups; i++) barrier_end(shared + C::handovers + 8 * i);
}

// Which warps come to `run`: where the roles part before it, those of one of them.
enum class Comes { kAll, kProducers, kOthers };

// `part`: the one run of this CTA, where it is a part's. `all`: where the warps of both ways meet, if they come by two.
template <class C, Comes kComes = Comes::kAll>
DEVICE void run(const Params& p, const Neighbours& b, u32 shared, Work* part, Meeting* all = nullptr) {
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
        init_barriers<C>(shared, rank);
        barrier_init_fence();
        fence_async_proxy();
    }
    if constexpr (!C::kParts) wait_for_kernel_before();
    if constexpr (C::kForm == Form::kWhole) let_next_kernel_start();
    if (C::kNorms && thread < 128) store_shared_float(shared + C::norm_weight + thread * 4, b.norm_weight[thread]);
    if constexpr (kComes == Comes::kAll)
        __syncthreads();
    else
        (*all)(lane);
    if constexpr (C::kCluster) cluster_barrier();

    if (kComes == Comes::kProducers || (kComes == Comes::kAll && warp_index >= C::kFirstProducer / 32)) {
        constexpr int kHeld = OneShare::kProducerRegisters;  // by those of a share
        if constexpr (kComes != Comes::kProducers || C::kProducerRegisters < kHeld)
            release_registers<C::kProducerRegisters>();
        else if constexpr (C::kProducerRegisters > kHeld)
            claim_registers<C::kProducerRegisters>();
        int base = 0;
        for (int chunks; (chunks = next_run()) != kNoMore; base += max(chunks, 0)) {
            if (chunks < 0) continue;
            prepare_chunks<C>(p, w, shared, warp_index - C::kFirstProducer / 32, lane, rank, chunks, base, b, output);
        }
        if constexpr (C::kCluster) drain_stage<C>(shared, warp_index - C::kFirstProducer / 32, rank, base);
        if constexpr (C::kNorms)
            norm_last_output<C>(p, b, shared, warp_index - C::kFirstProducer / 32, lane, output);
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
        if constexpr (!C::kParts && C::kForm != Form::kWhole) let_next_kernel_start();
    }
}

// What a CTA knows of its part while it may be shared by time.
struct Halves {
    Work head;              // all of its chunks
    int part, begin, end;   // of the head's parts; this CTA's half, in chunks
    bool idle;              // the head has no such part
    Work guess, rest, all;  // runs: of producers before the seams are known and then, of consumers
    int seams[2];           // before both halves
    // Chunks before the half, and in all, that producers begin with before the seams are known.
    DEVICE int guessed() const { return min(begin, kGuess); }
    DEVICE int speculated() const { return idle ? 0 : min(guessed() + end - begin, kSpeculated); }
    DEVICE Walked<KDA_GATE_FLOAT> back(u32 shared) const {
        return {begin, shared + kWalk, kWalkStride, shared + kWalkAhead, OneShare::kRaw, shared_address(landed)};
    }

    u64 told;               // barrier: they are known, and with them `rest` and `all`
    u64 met;                // barrier: Meeting
    u64 landed[SeamWalk::places];
    u64 probed;
};

// A part that may not be shared: see run_part.
template <Comes kComes>
DEVICE void run_unshared(const Params& p, const Neighbours& b, u32 shared, Halves& s, bool walked, Meeting& meeting) {
    const Parts parts = parts_of(p, s.head.chunks, walked);
    if (s.part > parts.last()) return;
    if (threadIdx.x == 0) s.all = run_of(s.head, s.part, parts.begin(s.part), parts.begin(s.part + 1), 0);
    fence_async_proxy();  // reads and writes of what was there, before copies over it
    meeting(threadIdx.x & 31);
    if (s.part == 0) return run<First, kComes>(p, b, shared, &s.all, &meeting);
    run<Kernel, kComes>(p, b, shared, &s.all, &meeting);
}

// Each CTA takes its half of the chunks of a head that is walked, if that is right: while consumers look for the seam
// before it, producers prepare the first chunks, from kGuess before the half on. Consumers leave out those that the
// seam shows to be too early; with a seam still earlier, they leave out all, and producers begin again.
DEVICE void run_share(const Params& p, const Neighbours& b, u32 shared, Halves& s, u32 rank, bool walked) {
    using C = OneShare;
    const int thread = threadIdx.x, lane = thread & 31;
    const int warp_index = __shfl_sync(kAllLanes, thread >> 5, 0);
    const int guess = s.guessed(), speculated = s.speculated();
    const u32 told = shared_address(&s.told), seams = shared_address(s.seams);
    if (walked && thread == 0) {
        barrier_expect(told, 8);
        s.guess = run_of(s.head, s.part, s.begin, s.end, guess);
    }
    if (!walked) {  // what was asked for comes all the same
        for (int i = 0; i < speculated; i++) barrier_wait_together(shared + C::raw_full + 8 * i, 0);
        const auto back = s.back(shared);
        for (int i = 0; i < min(back.most(), SeamWalk::places); i++) back.wait_for(i);
    }
    __syncthreads();
    if (!walked && thread == 0) end_barriers<C>(shared);

    Meeting meeting{shared_address(&s.met), 0};
    auto shares = [&]() {
        barrier_wait_together(told, 0);
        return __shfl_sync(kAllLanes, !s.idle && by_shares(s.part, load_shared(seams), load_shared(seams + 4)), 0);
    };
    auto leave = [&]() {  // all that the other CTA writes here is the seam, which has come
        asm volatile("exit;");  // where a return would keep the registers of what follows
        __builtin_unreachable();
    };
    if (warp_index >= C::kFirstProducer / 32) {
        release_registers<C::kProducerRegisters>();  // consumers may have them when they know the seams
        Output output;
        const Work* w = &s.guess;
        for (int base = 0, chunks = speculated; walked;) {
            if (chunks > 0)
                prepare_chunks<C>(p, *w, shared, warp_index - C::kFirstProducer / 32, lane, rank, chunks, base, b, output);
            if (w == &s.rest) leave();
            if (!shares()) break;
            w = &s.rest;
            chunks = w->chunks;
            base = speculated;
        }
        if (walked) meeting(lane);  // all that was prepared is there
        return run_unshared<Comes::kProducers>(p, b, shared, s, walked, meeting);
    }
    if (walked) {
        // The chunks behind, into L2, once what comes first has come. A warp a chunk.
        if (warp_index >= 4) {
            const auto back = s.back(shared);
            if (back.most() > 0) back.wait_for(0);
            const int chunk = s.begin - guess + kSpeculated + warp_index - 4;
            if (lane == 0 && chunk < s.head.chunks) prefetch_chunk(p, s.head, chunk);
        }
        const int seam = walk<KDA_BOUNDED, KDA_GATE_FLOAT>(p, s.head, s.back(shared));
        const int begin = max(seam, 0), left_out = begin > guess ? speculated : guess - begin;
        if (thread == 0) {
            s.all = run_of(s.head, s.part, s.begin, s.end, begin);
            s.all.kept = rank == 1;
            s.rest = begin > guess ? s.all : run_of(s.head, s.part, s.begin - guess + speculated, s.end, 0);
            p.seams[seam_index(p, s.head.segment, 2 * s.part + rank, s.head.head)] = seam;
            barrier_arrive(told);
        }
        if (thread < 2) tell_seam(seams + 4 * rank, thread, seam, told);
        if (shares()) {
            named_barrier(Seam::barrier, Seam::threads);  // the assembler sees that warps have come together again
            claim_registers<C::kConsumerRegisters>();
            run_recurrence<C, false>(p, s.all, shared, warp_index, lane, rank, s.all.chunks, left_out);
            leave();
        }
        for (int i = 0; i < speculated; i++) barrier_wait_together(shared + C::full + 8 * i, 0);
        meeting(lane);
        if (thread == 0) end_barriers<C>(shared);
    }
    run_unshared<Comes::kOthers>(p, b, shared, s, walked, meeting);
}

// What a share needs first, before it is known whether the part will be shared. The requests of a warp come one after
// another, so several make them.
DEVICE void ask_for_first(const Params& p, const Halves& s, u32 shared) {
    const Work& head = s.head;
    const int start = s.begin - s.guessed(), lane = threadIdx.x & 31;
    const int producer = static_cast<int>(threadIdx.x >> 5) - OneShare::kFirstProducer / 32, i = producer >> 1;
    if (threadIdx.x == 0) s.back(shared).load(p, head, 0, SeamWalk::places);
    if (producer >= 0 && producer % 2 == 0 && i < s.speculated() && arrives(lane))
        load_raw_tiles<OneShare>(p, shared + OneShare::raw + i * OneShare::kRaw, shared + OneShare::raw_full + 8 * i,
                                 head.first_token + (start + i) * kChunk, head.head / p.group, head.head, lane);
}

// A part of a segment, by a cluster (parts.cuh). Where all before it and all before its middle is forgotten, the two
// CTAs share it by time instead of V, each with all of V: less work in all. Else a pair runs part 0, and of any other
// part one CTA makes B and the outputs as from nothing, the other one M and what the outputs have to add (correct.cu).
DEVICE void run_part(const Params& p, const Neighbours& b, u32 shared) {
    __shared__ Halves share;
    constexpr int kThreads = 32 * kChunk;
    static_assert(!kInParts || (Kernel::kThreads == kThreads && First::kThreads == kThreads &&
                                OneShare::kThreads == kThreads && OneShare::kConsumers == Seam::threads));
    const u32 rank = cluster_rank();
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&share.told), 2);
        Meeting::init(shared_address(&share.met), kThreads / 32);
        for (int i = 0; i < SeamWalk::places; i++) barrier_init(shared_address(share.landed + i), 1);
        barrier_init(shared_address(&share.probed), 1);
        init_barriers<OneShare>(shared, rank);
        barrier_init_fence();
        fence_async_proxy();
    }
    cluster_arrive();
    wait_for_kernel_before();
    if (threadIdx.x == 0) {
        const int index = blockIdx.x / 2, part = index / p.value_heads % p.parts;
        share.head = find_work(p, segment_at(p, index / p.value_heads / p.parts), index % p.value_heads);
        const Parts parts = parts_of(p, share.head.chunks, true);
        share.part = part;
        share.begin = rank ? parts.middle(part) : parts.begin(part);
        share.end = rank ? parts.begin(part + 1) : parts.middle(part);
        share.idle = part > parts.last();
        const Probe probe(p, share.head, shared, shared_address(&share.probed));
        if (!share.head.padding) ask_for_probe<KDA_GATE_FLOAT>(p, share.head, probe);
    }
    __syncthreads();
    const Work& head = share.head;
    if (head.padding) {
        const Parts parts = parts_of(p, head.chunks, true);
        if (rank == 0)
            write_zeros(p, run_of(head, share.part, share.begin, parts.begin(share.part + 1), 0), kThreads);
        return;
    }
    ask_for_first(p, share, shared);
    const bool walked = forgets<KDA_BOUNDED, KDA_GATE_FLOAT>(
        p, head, Probe(p, head, shared, shared_address(&share.probed)));
    cluster_wait();  // the other CTA runs
    if (!walked && threadIdx.x == 0)
        p.seams[seam_index(p, head.segment, 2 * share.part + rank, head.head)] = kNotWalked;
    run_share(p, b, shared, share, rank, __shfl_sync(kAllLanes, walked, 0));
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
