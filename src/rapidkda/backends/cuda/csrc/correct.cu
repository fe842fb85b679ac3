// What parts of a segment could not know while they ran: the state that each starts from.
//
// prefill.cu has left B and M of every part, outputs as from nothing, and a row for every token with which its output
// reads the part's start. Here a block makes the start S of a part, by the B of the last part before it that knew its
// own and the parts in between, and then one of three things:
//   a slice of a part's tokens      out += start_queries S
//   the last state of a segment     S M + B of its last part, into its slot
//   a checkpoint within a part      S M + B of the part as far as there, into its slot
// Last states come only here, so that pools may be updated in place.
//
// S is made as the recurrence keeps it, 64 rows (V) a warpgroup in registers, and then lies transposed in shared
// memory, the right operand of the products with queries. Their rows, like those of outputs, go between global memory
// and registers without a stop: 64 tokens a warpgroup, the next ones on their way. For that a lane wants of each row
// runs of eight elements, so channels of queries, like the columns of M, and those of outputs have the order
// `exchanged`.
//
// Grid: segments x heads last states, then slices, the latest parts, whose start takes longest, first; then checkpoints
// x heads.
#include "copy.cuh"
#include "shared.cuh"
#include "transition.cuh"

constexpr int kThreads = 256, kTile = 64;  // tokens of a warpgroup
constexpr int kAhead = 8;                  // tiles whose rows are asked for while their start is made
constexpr int kMatrices = 2;               // M's on their way or in use; then S^T
constexpr int kBytes = kMatrices * kMatrixBytes + 1024;

struct LaunchInfo {
    int threads, shared_bytes, cluster;
};
extern "C" __constant__ const LaunchInfo launch_info = {kThreads, kBytes, 1};

// A run of eight elements of a token's row, which nobody else reads.
DEVICE Words4 load_row(const u16* from) {
    Words4 x;
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0,%1,%2,%3},[%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}
DEVICE void store_row(u16* to, Words4 x) {
    asm volatile("st.global.v4.b32 [%0],{%1,%2,%3,%4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// What the seams of a head say, asked for in one trip to memory: whether it is walked, and which parts are shared.
struct Seams {
    bool walked;
    u32 shared;  // bits of parts

    DEVICE Seams(const Params& p, int segment, int head) {
        const int lane = threadIdx.x & 31;
        const int first = lane < p.parts ? p.seams[seam_index(p, segment, 2 * lane, head)] : kRemembers;
        const int second = lane < p.parts ? p.seams[seam_index(p, segment, 2 * lane + 1, head)] : kRemembers;
        shared = __ballot_sync(kAllLanes, lane < p.parts && by_shares(lane, first, second));
        walked = __shfl_sync(kAllLanes, first, 0) != kNotWalked;
    }
    DEVICE bool has(int part) const { return shared >> part & 1; }
};

// The last state of a head whose last part is shared: a copy, where it may be moved by sixteen bytes.
DEVICE bool copy_state(const Params& p, const Work& w, const float* from) {
    float* const to = static_cast<float*>(p.final_) + w.write_slot * p.final_stride + static_cast<i64>(w.head) * kMatrix;
    if (!(p.flags & kVectorStates) || !(p.flags & kFinalFloat) || reinterpret_cast<u64>(to) % 16) return false;
    constexpr int kEach = kMatrix / 4 / kThreads;
    Quad x[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) x[i] = reinterpret_cast<const Quad*>(from)[threadIdx.x + i * kThreads];
    let_next_kernel_start();
#pragma unroll
    for (int i = 0; i < kEach; i++) reinterpret_cast<Quad*>(to)[threadIdx.x + i * kThreads] = x[i];
    return true;
}

// A checkpoint's segment, or -1.
DEVICE int segment_of(const Params& p, int checkpoint) {
    for (int n = 0; n < p.segments; n++)
        if (checkpoint >= p.checkpoint_begin[n] && checkpoint < p.checkpoint_begin[n + 1]) return n;
    return -1;
}

// Transitions one after another: of parts of a head, then of a checkpoint if there is one.
struct Chain {
    int segment, head, first_part, parts, checkpoint;  // checkpoint: or -1

    DEVICE int count() const { return parts + (checkpoint >= 0); }
    DEVICE const float* at(const Params& p, int i) const {
        return i < parts ? transition_of(p, segment, first_part + i, head) : transition_at(p, checkpoint, head);
    }
};

// This lane's columns of a B, 8 q .. 8 q + 7 of every 32: of `row`, and of the row `step` behind.
DEVICE void load_rows(float* state, const float* from, int row, int step, int q) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const Quad* at = reinterpret_cast<const Quad*>(from + (row + i * step) * 128 + 32 * b + 8 * q);
            const Quad first = at[0], second = at[1];
            float* s = state + 16 * b + 2 * i;
            s[0] = first.x, s[1] = first.y, s[4] = first.z, s[5] = first.w;
            s[8] = second.x, s[9] = second.y, s[12] = second.z, s[13] = second.w;
        }
}
// The state to a pool, by way of shared memory, so that neighbouring threads store neighbouring elements.
DEVICE void store_rows(const float* state, void* base, i64 offset, int row, int q, bool is_float, bool v_first,
                       u32 shared) {
    auto place = [&](int r, int c) { return shared + (r * 130 + c) * 4; };
#pragma unroll
    for (int t = 0; t < 32; t++)
        store_shared_pair(place(row + (t & 1) * 8, 32 * (t >> 3) + 8 * q + (t & 6)), state[2 * t], state[2 * t + 1]);
    __syncthreads();
#pragma unroll 8
    for (int x = threadIdx.x; x < kMatrix; x += kThreads) {
        const int outer = x >> 7, inner = x & 127;
        store_element(base, offset + x, is_float, load_shared_float(v_first ? place(outer, inner) : place(inner, outer)));
    }
}

// state <- state through all transitions of a chain. matrices: kMatrices places for M; landed: their barriers.
DEVICE void apply(const Params& p, float* state, const Chain& chain, int row, int step, int q, u32 matrices,
                  u32 landed) {
    const int count = chain.count();
    auto load_matrix_of = [&](int i) {
        barrier_expect(landed + 8 * (i % kMatrices), kMatrixBytes);
        copy_bulk(matrices + i % kMatrices * kMatrixBytes, chain.at(p, i) + kMatrix, kMatrixBytes,
                  landed + 8 * (i % kMatrices));
    };
    if (threadIdx.x == 0)
        for (int i = 0; i < min(count, kMatrices); i++) load_matrix_of(i);
    if (count == 0) return;
    float next[64];
    load_rows(next, chain.at(p, 0), row, step, q);
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        u32 high[32], low[32];
#pragma unroll
        for (int t = 0; t < 32; t++) split_bf16(high[t], low[t], state[2 * t], state[2 * t + 1]);
        barrier_wait(landed + 8 * (i % kMatrices), i / kMatrices & 1);
        start_transition(next, high, low, matrices + i % kMatrices * kMatrixBytes);
        if (i + 1 < count) load_rows(state, chain.at(p, i + 1), row, step, q);
        wgmma_wait<0>();
#pragma unroll
        for (int t = 0; t < 64; t++) {
            const float b = state[t];
            state[t] = next[t];
            next[t] = b;
        }
        __syncthreads();
        if (threadIdx.x == 0 && i + kMatrices < count) load_matrix_of(i + kMatrices);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) correct(const __grid_constant__ Params p) {
    extern __shared__ u8 dynamic_shared[];
    __shared__ u64 barriers[kMatrices];
    const u32 shared = (shared_address(dynamic_shared) + 1023) & ~1023u, landed = shared_address(barriers);
    const int thread = threadIdx.x, lane = thread & 31, warpgroup = thread >> 7, warp = thread >> 5 & 3;
    const int g = lane >> 2, q = lane & 3;

    wait_for_kernel_before();

    // What is to be done.
    const int units = p.segments * p.value_heads, later = p.parts - 1, checkpoints = p.checkpoints * p.value_heads;
    const int slices = (static_cast<int>(gridDim.x) - units - checkpoints) / (units * later);
    int index = blockIdx.x, segment, part = -1, slice = 0, checkpoint = -1;
    const int head = index % p.value_heads;
    if (index < units) {
        segment = index / p.value_heads;
    } else if ((index -= units) < units * later * slices) {
        index /= p.value_heads;
        segment = index % p.segments;
        index /= p.segments;
        slice = index % slices;
        part = later - index / slices;
    } else {
        checkpoint = (index - units * later * slices) / p.value_heads;
        segment = segment_of(p, checkpoint);
    }
    if (segment < 0) return;
    const Work w = find_work(p, segment, head);
    const Seams seams(p, segment, head);
    if (checkpoint < 0 && part >= 0 && seams.has(part)) return;
    if (w.padding) return;
    const Parts parts = parts_of(p, w.chunks, seams.walked);
    const int last = parts.last();
    int slot = 0;
    if (checkpoint >= 0) {
        const int chunk = p.checkpoint_offset[checkpoint] / kChunk - 1;
        slot = p.checkpoint_slot[checkpoint];
        if (chunk < 0 || chunk >= w.chunks || slot < 0 || slot >= p.checkpoint_rows) return;
        part = parts.part_of(chunk);
    }
    const bool tokens = part >= 0 && checkpoint < 0;
    if (part > last || (part < 0 && !p.final_)) return;
    if (checkpoint >= 0 && (part == 0 || seams.has(part))) return;
    if (part < 0 && seams.has(last) && copy_state(p, w, transition_of(p, segment, last, head))) return;

    // The rows of this slice, in tiles; the first ones are brought into the L2 cache while their start is made.
    const int first = parts.begin(max(part, 0)) * kChunk;
    const int rows = min(w.rows, parts.begin(max(part, 0) + 1) * kChunk) - first;
    const int tiles = tokens ? (rows + kTile - 1) / kTile : 0, begin = tiles * slice / slices;
    const int end = tiles * (slice + 1) / slices;
    if (tokens && begin >= end) return;
    const int query_stride = 128 * p.value_heads;
    const u16* const queries = p.start_queries + (w.first_token + first) * static_cast<i64>(query_stride) + head * 128;
    u16* const out = p.out + (w.first_token + first) * p.out_token_stride + head * p.out_head_stride;
    for (int token = begin * kTile + thread; token < min(rows, (begin + kAhead) * kTile); token += kThreads) {
        const i64 at = token;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(queries + at * query_stride + 64 * half));
            asm volatile("prefetch.global.L2 [%0];" ::"l"(out + at * p.out_token_stride + 64 * half));
        }
    }

    if (thread == 0) {
        for (int i = 0; i < kMatrices; i++) barrier_init(landed + 8 * i, 1);
        barrier_init_fence();
        fence_async_proxy();
    }
    const int before = part < 0 ? last + 1 : part;  // the part whose start is wanted, or the end
    int known = before - 1;
    while (known > 0 && !seams.has(known)) known--;
    const int own_row = warpgroup * 64 + warp * 16 + g;
    const int row = tokens ? exchanged(own_row) : own_row, step = tokens ? 2 : 8;
    float state[64];
    load_rows(state, transition_of(p, segment, known, head), row, step, q);
    __syncthreads();
    apply(p, state, Chain{segment, head, known + 1, before - known - 1, checkpoint}, row, step, q, shared, landed);
    const i64 head_offset = static_cast<i64>(head) * kMatrix;
    if (checkpoint >= 0)
        return store_rows(state, p.checkpoint_pool, slot * p.checkpoint_stride + head_offset, row, q,
                          p.flags & kCheckpointFloat, p.flags & kStateVFirst, shared);
    if (part < 0)
        return store_rows(state, p.final_, w.write_slot * p.final_stride + head_offset, row, q, p.flags & kFinalFloat,
                          p.flags & kStateVFirst, shared);

    // S^T, over what M's have left.
#pragma unroll
    for (int j = 0; j < 8; j++) {
        u32 high[4], low[4];
#pragma unroll
        for (int t = 0; t < 4; t++) split_bf16(high[t], low[t], state[8 * j + 2 * t], state[8 * j + 2 * t + 1]);
        const int k = 16 * j + (lane >> 4) * 8 + (lane & 7), piece = 2 * warp + (lane >> 3 & 1);
        const u32 to = shared + warpgroup * 16384 + k * 128 + ((piece ^ (k & 7)) << 4);
        store_matrix_transposed(to, high);
        store_matrix_transposed(to + kMatrixBytes / 2, low);
    }
    fence_async_proxy();
    __syncthreads();

    // Lane q: tokens g and g + 8 of 16, channels 8 q .. 8 q + 7 of every 32.
    Words4 query[2][4], sums_of[2][4];
    auto load_tile = [&](int tile) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = tile * kTile + warp * 16 + g + 8 * i;
            const i64 at = token < rows ? token : 0;
#pragma unroll
            for (int b = 0; b < 4; b++) query[i][b] = load_row(queries + at * query_stride + 32 * b + 8 * q);
#pragma unroll
            for (int b = 0; b < 4; b++) sums_of[i][b] = load_row(out + at * p.out_token_stride + 32 * b + 8 * q);
        }
    };
    if (begin + warpgroup < end) load_tile(begin + warpgroup);
#pragma unroll 1
    for (int tile = begin + warpgroup; tile < end; tile += 2) {
        float sums[64];
        u32 a[32];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int b = 0; b < 4; b++) {
                const u32 o[4] = {sums_of[i][b].x, sums_of[i][b].y, sums_of[i][b].z, sums_of[i][b].w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sums[16 * b + 4 * j + 2 * i] = low_bf16(o[j]);
                    sums[16 * b + 4 * j + 2 * i + 1] = high_bf16(o[j]);
                }
                a[8 * b + i] = query[i][b].x;
                a[8 * b + 2 + i] = query[i][b].y;
                a[8 * b + 4 + i] = query[i][b].z;
                a[8 * b + 6 + i] = query[i][b].w;
            }
        if (tile + 2 < end) load_tile(tile + 2);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 8; s++) {
            const u32 from = swizzled_tile(shared, 16384) + s * (2048 / 16);
            wgmma_n128(sums, a + 4 * s, from + kMatrixBytes / 2 / 16);
            wgmma_n128(sums, a + 4 * s, from);
        }
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = tile * kTile + warp * 16 + g + 8 * i;
            if (token >= rows) continue;
#pragma unroll
            for (int b = 0; b < 4; b++) {
                const float* x = sums + 16 * b + 2 * i;
                store_row(out + token * p.out_token_stride + 32 * b + 8 * q,
                          Words4{pack_bf16(x[0], x[1]), pack_bf16(x[4], x[5]), pack_bf16(x[8], x[9]),
                                 pack_bf16(x[12], x[13])});
            }
        }
    }
}
