// mbarriers, named barriers of a group of warps, and barriers of a cluster.
#pragma once
#include "scalar.cuh"

DEVICE void barrier_init(u32 bar, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(bar), "r"(arrivals));
}
// The barrier's memory may be used for other things.
DEVICE void barrier_end(u32 bar) { asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(bar) : "memory"); }
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// One lane arrives for its warp, after __syncwarp. racecheck follows what the arriving lane itself did, not what
// __syncwarp orders before it, so a build for it (RAPIDKDA_RACECHECK=1) lets every lane arrive.
#ifndef KDA_EVERY_LANE_ARRIVES
#define KDA_EVERY_LANE_ARRIVES 0
#endif
constexpr int kWarpArrivals = KDA_EVERY_LANE_ARRIVES ? 32 : 1;
DEVICE bool arrives(int lane) { return KDA_EVERY_LANE_ARRIVES || lane == 0; }
// The same for a warp that has converged, without its lanes' numbers.
DEVICE bool arrives() {
    u32 chosen;
    asm volatile("{.reg .pred p; elect.sync _|p,0xffffffff; selp.u32 %0,1,0,p;}" : "=r"(chosen));
    return KDA_EVERY_LANE_ARRIVES || chosen;
}
DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared.b64 _,[%0];" ::"r"(bar) : "memory"); }
// One arrival that also announces `bytes` of asynchronous copies.
DEVICE void barrier_expect(u32 bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 bar, int parity) {
    asm volatile(
        "{\n.reg .pred p;\nTRY_%=:\nmbarrier.try_wait.parity.shared.b64 p,[%0],%1;\n@p bra DONE_%=;\nbra TRY_%=;\n"
        "DONE_%=:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// The same by a vote of the warp: behind a plain wait outside of the main loops the assembler takes it for diverged, and
// moves addresses of tiles to uniform registers every chunk.
DEVICE void barrier_wait_together(u32 bar, int parity) {
    u32 done;
    do
        asm volatile(
            "{.reg .pred p,q; mbarrier.try_wait.parity.shared.b64 p,[%1],%2; vote.sync.all.pred q,p,0xffffffff; "
            "selp.u32 %0,1,0,q;}"
            : "=r"(done)
            : "r"(bar), "r"(parity)
            : "memory");
    while (!done);
}
// The same on a CTA of the cluster, this one or the other. Relaxed on purpose: what these order is done by the
// consumers' own reads and by the copy engine, and release semantics at cluster scope cost about 1,600 cycles each.
DEVICE void barrier_arrive_remote(u32 bar, u32 rank) {
    asm volatile(
        "{.reg .b32 r; mapa.shared::cluster.u32 r,%0,%1; "
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _,[r];}" ::"r"(bar),
        "r"(rank)
        : "memory");
}
DEVICE void barrier_expect_remote(u32 bar, u32 rank, int bytes) {
    asm volatile(
        "{.reg .b32 r; mapa.shared::cluster.u32 r,%0,%1; "
        "mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _,[r],%2;}" ::"r"(bar),
        "r"(rank), "r"(bytes)
        : "memory");
}

DEVICE void named_barrier(int id, int threads) { asm volatile("bar.sync %0,%1;" ::"r"(id), "r"(threads) : "memory"); }

// Arrive without waiting for the others.
DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0,%1;" ::"r"(id), "r"(threads) : "memory");
}

// Meetings of all warps of a CTA, where roles come to one by different ways: a __syncthreads would have to be the same
// instruction for all. An mbarrier of as many warps, and how many meetings it has seen.
struct Meeting {
    u32 bar;
    int turn;
    DEVICE static void init(u32 bar, int warps) { barrier_init(bar, warps * kWarpArrivals); }
    DEVICE void operator()(int lane) {
        __syncwarp();
        if (arrives(lane)) barrier_arrive(bar);
        barrier_wait_together(bar, turn++ & 1);
    }
};

// racecheck takes note of a warp's passage after the fact: the other warp's first reads may come before the note. A
// second barrier in a build for it lets no race through that one would not, since nothing is accessed between the two.
DEVICE void meet(int id, int threads) {
    named_barrier(id, threads);
    if (KDA_EVERY_LANE_ARRIVES) named_barrier(id, threads);
}
// One of two warps goes ahead of the other: a named barrier where it only arrives. racecheck does not follow those that
// only arrive, so in a build for it this is an mbarrier, of 32 arrivals, with a phase a turn.
struct Handover {
    int id;
    u32 bar;

    DEVICE void arrive() const {
        if (KDA_EVERY_LANE_ARRIVES)
            barrier_arrive(bar);
        else
            named_barrier_arrive(id, 64);
    }
    DEVICE void wait(int turn) const {
        if (KDA_EVERY_LANE_ARRIVES)
            barrier_wait(bar, turn & 1);
        else
            named_barrier(id, 64);
    }
};

// Relaxed: what the CTAs tell each other is ordered by fence.mbarrier_init and by mbarriers. A release is a fence over all
// of the GPU's memory, which waits for every store that is on its way.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void cluster_barrier() {
    cluster_arrive();
    cluster_wait();
}
DEVICE u32 cluster_rank() {
    u32 r;
    asm("mov.u32 %0,%%cluster_ctarank;" : "=r"(r));
    return r;
}

// A kernel may start while the one before it ends (Shape.overlap in driver.py). All of its threads wait here before they
// touch what that one, or any before it, writes or reads.
DEVICE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// When all CTAs have said so, or have left, those of the next kernel may take what is free.
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

template <int kRegisters>
DEVICE void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
DEVICE void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
