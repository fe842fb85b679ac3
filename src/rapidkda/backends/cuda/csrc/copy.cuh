// Bulk copies: tensor maps (TMA) into shared memory, and shared memory to another CTA of the cluster.
#pragma once
#include "barrier.cuh"

// As cuTensorMapEncodeTiled writes it; opaque here.
struct alignas(64) TensorMap {
    u64 words[16];
};

// Fetches a map before the first copy needs it.
DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// A tile of 16 tokens of one head: dims (element in a 128-byte block, token, block, head). It lands as [block][16
// tokens][128 bytes] with the 128-byte swizzle; how many blocks is the map's box. Tokens past the tensor's end arrive
// as zeros.
DEVICE void copy_tile(u32 destination, const TensorMap* map, int token, int block, int head, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0],[%1,{%2,%3,%4,%5}],[%6];" ::"r"(destination),
        "l"(map), "r"(0), "r"(token), "r"(block), "r"(head), "r"(bar)
        : "memory");
}
// The same tile, only brought into the L2 cache.
DEVICE void prefetch_tile(const TensorMap* map, int token, int block, int head) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0,{%1,%2,%3,%4}];" ::"l"(map), "r"(0), "r"(token),
                 "r"(block), "r"(head)
                 : "memory");
}
// The same into the CTA `rank` of the cluster, at the same offsets, completing on its barrier.
DEVICE void copy_tile_remote(u32 destination, const TensorMap* map, int token, int block, int head, u32 bar, u32 rank) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0],[%1,{%2,%3,%4,%5}],[%6],%7;" ::"r"(destination),
        "l"(map), "r"(0), "r"(token), "r"(block), "r"(head), "r"(bar), "h"(static_cast<u16>(1u << rank))
        : "memory");
}
// Contiguous bytes of global memory, a multiple of 16.
DEVICE void copy_bulk(u32 destination, const void* source, int bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
                     destination),
                 "l"(source), "r"(bytes), "r"(bar)
                 : "memory");
}
// This CTA's shared memory to the same offset in CTA `rank`, completing on the barrier at the same offset there.
DEVICE void copy_to_peer(u32 source, u32 rank, int bytes, u32 bar) {
    asm volatile(
        "{.reg .b32 d,b; mapa.shared::cluster.u32 d,%0,%1; mapa.shared::cluster.u32 b,%2,%1; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d],[%0],%3,[b];}" ::"r"(source),
        "r"(rank), "r"(bar), "r"(bytes)
        : "memory");
}

// One word from global memory, by this thread, and the wait for all of its words.
DEVICE void copy_word(u32 destination, u64 source) {
    asm volatile("cp.async.ca.shared.global [%0],[%1],4;" ::"r"(destination), "l"(source) : "memory");
}
DEVICE void copy_8(u32 destination, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0],[%1],8;" ::"r"(destination), "l"(from) : "memory");
}
DEVICE void copy_16(u32 destination, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(destination), "l"(from) : "memory");
}
DEVICE void copy_words_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Plain bytes of global memory into this CTA's shared memory; addresses and count are multiples of 16. They are read
// once: they leave the L2 cache first.
DEVICE void copy_bytes(u32 destination, const void* from, int bytes, u32 bar) {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(
            destination),
        "l"(from), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
}
// The other way; what was asked for before `commit_writes` is a group.
DEVICE void write_bytes(void* to, u32 source, int bytes) {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0],[%1],%2,%3;" ::"l"(to), "r"(source),
                 "r"(bytes), "l"(policy)
                 : "memory");
}
DEVICE void commit_writes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the copy engine has read all that this thread's groups write.
DEVICE void wait_for_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Into the L2 cache; address and count are multiples of 16.
DEVICE void prefetch_bytes(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(from), "r"(bytes) : "memory");
}
DEVICE void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
// Global stores of what nobody reads soon.
DEVICE void store_once(float* to, Quad x) {
    asm volatile("st.global.cs.v4.f32 [%0],{%1,%2,%3,%4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
DEVICE void store_once(u16* to, Words2 x) {
    asm volatile("st.global.cs.v2.b32 [%0],{%1,%2};" ::"l"(to), "r"(x.x), "r"(x.y) : "memory");
}
