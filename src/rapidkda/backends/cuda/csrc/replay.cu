// Verification by replay, and commit: fold the accepted records into the state, store it, run the drafts, record them.
// The tokens of a request are one small chunk; with D_i the decay from the state to token i, all of them read the state
// at once, and what a token sees of those before it follows from sums over channels that need no state:
//
//     u_i = b_i (v_i - S (D_i k_i) - sum_j<i a_ij u_j)      o_i = S (D_i q_i) + sum_j<=i c_ij u_j
//     a_ij, c_ij: the sums over channels of k_i k_j and q_i k_j times the decay from j to i
//
// so u = M r and o = S (D q) + W r with r = v - S (D k), M = (1 + b a)^-1 b, W = c M. Every decay is a product of decays
// of single tokens: nothing overflows, and no difference of sums loses digits.
//
// A CTA takes one head of one request after another. Eight maker warps turn keys, queries and gates of later heads into
// tables in shared memory: each activates a token, and then takes an eighth of the channels of all. Consumer warps own 16
// rows of the state each, which the copy engine brings ahead and writes back, and multiply them in bfloat16 (two numbers
// for each of both operands). They start when the operands are there; M and W follow while they are at it. Records of
// keys and decays are the makers', corrections those of the warp that owns their rows, so nobody overwrites what another
// has yet to read. Requests of more tokens or records than a chunk holds take several turns, see Turn.
//
// With deferred states (`held`) a step whose records fit behind those of the steps before leaves the state as it is. Then
// nobody makes the state under the records either: with E the decay under them and k'_j their keys decayed to the last,
//
//     S' x = S (E x) + sum_j u_j (k'_j x)
//
// so E goes into the operands, the makers take the sums k'_j x on the tensor cores, and the consumers add U times those.
//
// Compiled with KDA_STATE_FLOAT, KDA_TOKENS, the size of a chunk (2, 4 or 8), KDA_FOLDS, the records that a turn applies,
// KDA_DEFERRED and KDA_MANY_TURNS defined.
#include "replay_consume.cuh"
#include "replay_make.cuh"

struct LaunchInfo {
    int threads, shared_bytes, cluster;
};
extern "C" __constant__ const LaunchInfo launch_info = {kThreads, kBytes + 128, 1};

// Brings what a warp reads of the CTA's first heads into the L2 cache, by tables that may be another step's.
DEVICE void prefetch_first(const StepParams& p, int warp, int lane) {
    const int heads = p.segments * p.value_heads;
#pragma unroll 1
    for (int i = 0, at = blockIdx.x; i < kStages && at < heads; i++, at += gridDim.x) {
        const int n = at / p.value_heads, head = at - n * p.value_heads;
        const Request r = read_request<true>(p, n);
        if (!r.busy) continue;
        if (warp >= kConsumers) {
            const Work w = make_work<true>(p, r, head);
            prefetch_records(p, w, (warp - kConsumers) * 32 + lane);
            prefetch_tokens(p, w, (warp - kConsumers) * 32 + lane);
        } else if (lane == 0 && p.flags & kVectorStates) {
            Rows::prefetch(p, r.slot * p.pool_stride + head * kMatrix, warp * Rows::kRows);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) replay(const __grid_constant__ StepParams p) {
    extern __shared__ u8 dynamic_shared[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(kAllLanes, threadIdx.x >> 5, 0);
    const u32 shared = (shared_address(dynamic_shared) + 127) & ~127u;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kConsumers * kStages; i++) barrier_init(shared + kBarriers + 8 * i, kWarpArrivals);
        for (int i = 0; i < kSets; i++) {
            barrier_init(shared + kMade + 8 * i, kMakers * kWarpArrivals);
            barrier_init(shared + kMixed + 8 * i, kMakers * kWarpArrivals);
            barrier_init(shared + kUsed + 8 * i, kConsumers * kWarpArrivals);
        }
        barrier_init_fence();
    }
    let_next_kernel_start();
    prefetch_first(p, warp, lane);
    wait_for_kernel_before();
    Finder finder;
    if (warp == kConsumers) finder.find(p, List{shared + kList}, 0, lane);
    __syncthreads();
    if (warp < kConsumers) {
        claim_registers<kConsumerRegisters>();
        consume(p, shared, warp, lane);
    } else {
        release_registers<kMakerRegisters>();
        make(p, shared, finder, warp - kConsumers, lane);
    }
}
