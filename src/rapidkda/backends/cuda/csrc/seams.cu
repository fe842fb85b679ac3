// What a part of a segment must know of the tokens before it, per head, decided on the device from the inputs.
//
// A state S before a run of tokens adds A S to the state after it (S by columns v, A [K, K] the product of the tokens'
// (I - b k k^T) Diag(exp g)). Where A is nothing, the part may start from zero a few chunks early (its warm-up) and
// needs nothing of the parts before it. Every element of A is bounded by the product of the elements' magnitudes,
//     |I - b k k^T| exp(g),  |1 - b k_j^2| on the diagonal and |b k_i k_j| beside it,
// whatever the gates, keys and write strengths are: no bound by the sums of a channel's gates holds, because the delta
// rule moves mass between channels, and the product of each token's largest exp(g) is too weak, because with 128
// channels one of them is always open. Walking back from the part's first token with column sums,
//     y_j <- exp(g_j) (|1 - b k_j^2| y_j + |b k_j| s),  s = sum_i |k_i| y_i,  y = 1 at the start,
// sum_i |(A S)_iv| <= max_j y_j sum_j |S_jv|. A seam is the number of chunks after which every y is below 2^-126, the
// least normal number of fp32, or -1 where that takes more than kMostWarmUp chunks: then the part needs its exact start.
// NaNs compare false and take the exact way, and so does everything where keys are not normalised here: with longer keys
// the tokens after the seam could make something of nothing.
//
// Grid: (value heads, parts, segments). A block also copies its share of the segment's own state to `starts`, where the
// first part reads it: in place, the last part may have written the slot by then.
#include "gate.cuh"
#include "shared.cuh"
#include "work.cuh"

constexpr int kGroup = 4, kGroups = kChunk / kGroup;          // tokens that a warp prepares; warps a chunk
constexpr int kBatch = 4, kBatches = 2;                       // chunks that are walked between two barriers; at most
constexpr int kMostWarmUp = kBatch * kBatches;
constexpr int kThreads = 32 * kGroups * kBatch;
constexpr float kStart = 0x1p64f, kForgotten = 0x1p-62f;
constexpr float kLeast = 0x1p-8f;  // a chunk, or the walk is given up: slow gates are told apart in one
constexpr int kKeyBytes = 4096, kTileBytes = kKeyBytes + 8192;
constexpr int kGroupBytes = 9 * 512 + 32;
constexpr int kBytes = kBatch * kTileBytes + kThreads / 32 * kGroupBytes + 1024;

struct LaunchInfo {
    int threads, shared_bytes, cluster;
};
extern "C" __constant__ const LaunchInfo launch_info = {kThreads, kBytes, 1};

// log2 decays of this lane's four channels from their logits.
struct Gates : GateChannels {
    bool bounded, raw;

    DEVICE Gates(const Params& p, int head, int channel)
        : GateChannels(gate_channels(p, head, channel, p.lower_bound < 0.f)),
          bounded(p.lower_bound < 0.f),
          raw(p.flags & kRawGate) {}
    DEVICE float log2_decay(float g, int channel) const {
        if (bounded) return bound * bounded_fraction(g, bias[channel], amplitude);
        return amplitude * (raw ? softplus_strength(g, bias[channel], bound) : log_decay_strength(g, bound));
    }
};

// Four neighbouring channels of a token in a swizzled tile: bf16 [2][16][128 B], or fp32 [4][16][128 B].
DEVICE Quad load_bf16_channels(u32 tile, int token, int lane) {
    const Pair x = load_shared_pair(tile + (lane >> 4) * 2048 + token * 128 + (((lane & 15) * 8) ^ ((token & 7) << 4)));
    const u32 a = __float_as_uint(x.x), b = __float_as_uint(x.y);
    return Quad{low_bf16(a), high_bf16(a), low_bf16(b), high_bf16(b)};
}
DEVICE Quad load_float_channels(u32 tile, int token, int lane) {
    return load_shared_quad(tile + (lane >> 3) * 2048 + token * 128 + (((lane & 7) * 16) ^ ((token & 7) << 4)));
}

// Sums over the warp of several values, side by side.
template <int kCount>
DEVICE void warp_sums(float (&x)[kCount]) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
#pragma unroll
        for (int i = 0; i < kCount; i++) x[i] += __shfl_xor_sync(kAllLanes, x[i], offset);
}

DEVICE Quad operator*(Quad a, Quad b) { return Quad{a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
DEVICE float dot(Quad a, Quad b) { return fmaf(a.x, b.x, a.y * b.y) + fmaf(a.z, b.z, a.w * b.w); }
DEVICE Quad add(Quad a, Quad b, float s) {
    return Quad{fmaf(b.x, s, a.x), fmaf(b.y, s, a.y), fmaf(b.z, s, a.z), fmaf(b.w, s, a.w)};
}

// Four tokens at once, so that a step of the walk is one reduction for all of them. With keep_t = exp(g) |1 - b k^2|,
// move_t = exp(g) |b k| and t counted backwards, the step of a token is y <- keep_t y + move_t s_t, s_t = <|k_t|, y>. In
// terms of the y before the four,
//     s_t = <|k_t| keep_0 .. keep_(t-1), y> + sum_(u<t) <|k_t| keep_(u+1) .. keep_(t-1), move_u> s_u,
//     y <- keep_0 .. keep_3 y + sum_t (keep_(t+1) .. keep_3 move_t) s_t.
// A group's factors: nine rows of 128 fp32 (the read vectors, the write vectors, the decay), then the six products.
//
// `first`: of the tokens, in the tile; `rows` of the tile's tokens exist; lane t holds the write strength of first + t.
DEVICE void prepare_group(const Params& p, u32 to, u32 keys, u32 logits, const Gates& gates, int lane, int first,
                          float beta, int rows) {
    Quad k[kGroup], keep[kGroup], move[kGroup];
    float norms[kGroup];
#pragma unroll
    for (int t = 0; t < kGroup; t++) {
        k[t] = load_bf16_channels(keys, first + kGroup - 1 - t, lane);
        norms[t] = dot(k[t], k[t]);
    }
    warp_sums(norms);
#pragma unroll
    for (int t = 0; t < kGroup; t++) {
        const int token = first + kGroup - 1 - t;
        const bool exists = token < rows;
        const Quad g = p.flags & kGateFloat ? load_float_channels(logits, token, lane)
                                            : load_bf16_channels(logits, token, lane);
        auto decay = [&](float x, int c) { return exists ? exp2_approx(gates.log2_decay(x, c)) : 1.f; };
        const Quad e{decay(g.x, 0), decay(g.y, 1), decay(g.z, 2), decay(g.w, 3)};
        const float scale = inverse_sqrt(norms[t] + 1e-6f), b = __shfl_sync(kAllLanes, beta, kGroup - 1 - t);
        auto magnitude = [&](float x) { return exists ? fabsf(x * scale) : 0.f; };
        k[t] = Quad{magnitude(k[t].x), magnitude(k[t].y), magnitude(k[t].z), magnitude(k[t].w)};
        const Quad bk{b * k[t].x, b * k[t].y, b * k[t].z, b * k[t].w};
        keep[t] = e * Quad{fabsf(1.f - bk.x * k[t].x), fabsf(1.f - bk.y * k[t].y), fabsf(1.f - bk.z * k[t].z),
                           fabsf(1.f - bk.w * k[t].w)};
        move[t] = e * Quad{fabsf(bk.x), fabsf(bk.y), fabsf(bk.z), fabsf(bk.w)};
    }
    const u32 own = to + lane * 16;
    float products[kGroup * (kGroup - 1) / 2];
#pragma unroll
    for (int t = 0; t < kGroup; t++) {
        Quad read = k[t], write = move[t];
#pragma unroll
        for (int u = t - 1; u >= 0; u--) {
            products[t * (t - 1) / 2 + u] = dot(read, move[u]);
            read = read * keep[u];
        }
#pragma unroll
        for (int u = t + 1; u < kGroup; u++) write = write * keep[u];
        store_shared_quad(own + t * 512, read);
        store_shared_quad(own + (kGroup + t) * 512, write);
    }
    store_shared_quad(own + 8 * 512, keep[0] * keep[1] * (keep[2] * keep[3]));
    warp_sums(products);
    if (lane != 0) return;
    store_shared_quad(to + 9 * 512, Quad{products[0], products[1], products[2], products[3]});
    store_shared_pair(to + 9 * 512 + 16, products[4], products[5]);
}
DEVICE Quad walk_group(Quad y, u32 from, int lane) {
    const u32 own = from + lane * 16;
    float s[kGroup];
    Quad write[kGroup];
#pragma unroll
    for (int t = 0; t < kGroup; t++) s[t] = dot(load_shared_quad(own + t * 512), y);
    Quad next = load_shared_quad(own + 8 * 512) * y;
#pragma unroll
    for (int t = 0; t < kGroup; t++) write[t] = load_shared_quad(own + (kGroup + t) * 512);
    const Quad low = load_shared_quad(from + 9 * 512);        // (1, 0), (2, 0), (2, 1), (3, 0)
    const Pair high = load_shared_pair(from + 9 * 512 + 16);  // (3, 1), (3, 2)
    warp_sums(s);
    s[1] = fmaf(low.x, s[0], s[1]);
    s[2] = fmaf(low.z, s[1], fmaf(low.y, s[0], s[2]));
    s[3] = fmaf(high.y, s[2], fmaf(high.x, s[1], fmaf(low.w, s[0], s[3])));
#pragma unroll
    for (int t = 0; t < kGroup; t++) next = add(next, write[t], s[t]);
    return next;
}

// This block's share of the segment's own state.
DEVICE void copy_initial(const Params& p, const Work& w) {
    const bool v_first = p.flags & kStateVFirst, is_float = p.flags & kInitialFloat;
    const int share = (128 * 128 + gridDim.y - 1) / gridDim.y, begin = blockIdx.y * share;
    const int end = min(begin + share, 128 * 128);
    const i64 from = w.read_slot * p.initial_stride + static_cast<i64>(w.head) * (128 * 128);
    float* to = p.starts + start_offset(p, w);
    constexpr int kAtOnce = 8;  // loads in flight
    for (int first = begin + threadIdx.x; first < end; first += kAtOnce * kThreads) {
        float values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            const int x = first + i * kThreads, at = v_first ? x : (x & 127) * 128 + (x >> 7);
            values[i] = w.has_initial && x < end ? load_element(p.initial, from + at, is_float) : 0.f;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; i++)
            if (first + i * kThreads < end) to[first + i * kThreads] = values[i];
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) seams(const __grid_constant__ Params p) {
    extern __shared__ u8 dynamic_shared[];
    __shared__ u64 barriers[kBatch];  // the tiles of a chunk landed
    __shared__ Work w;
    __shared__ int verdict;  // the seam, or kOpen
    constexpr int kOpen = -2;
    const u32 tiles = (shared_address(dynamic_shared) + 1023) & ~1023u, factors = tiles + kBatch * kTileBytes;
    const u32 landed = shared_address(barriers);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, chunk = warp / kGroups, group = warp % kGroups;
    if (threadIdx.x == 0) {
        if (p.tokens > 0) {
            prefetch_map(&p.k);
            prefetch_map(&p.g);
        }
        w = find_work(p, (blockIdx.z * p.parts + blockIdx.y / 2) * p.value_heads + blockIdx.x, blockIdx.y & 1, true, false);
        for (int i = 0; i < kBatch; i++) barrier_init(landed + 8 * i, 1);
        barrier_init_fence();
        fence_async_proxy();
    }
    __syncthreads();
    if (w.padding) return;

    // Chunk i before the part begins at token first_token - (i + 1) kChunk; `most` of them may be walked.
    const int most = p.flags & kL2Norm ? min(w.first_chunk, kMostWarmUp) : 0;
    auto load_batch = [&](int batch) {
        for (int i = batch * kBatch; i < min(most, (batch + 1) * kBatch); i++) {
            const int token = w.first_token - (i + 1) * kChunk;
            const u32 to = tiles + i % kBatch * kTileBytes, bar = landed + 8 * (i % kBatch);
            barrier_expect(bar, kKeyBytes + (p.flags & kGateFloat ? 8192 : 4096));
            copy_tile(to, &p.k, token, 0, w.head / p.group, bar);
            copy_tile(to + kKeyBytes, &p.g, token, 0, w.head, bar);
        }
    };
    if (threadIdx.x == 0) load_batch(0);
    // Lane 4 b + t holds the write strength of this warp's token t in batch b.
    const int segment_rows = w.first_chunk * kChunk + w.rows;
    const int row = (w.first_chunk - lane / kGroup * kBatch - chunk - 1) * kChunk + group * kGroup + lane % kGroup;
    float beta = 0.f;
    if (lane < kBatches * kGroup && row >= 0 && row < segment_rows) {
        const i64 token = w.first_token - w.first_chunk * kChunk + row;
        beta = load_element(p.beta, token * p.beta_token_stride + w.head * p.beta_head_stride, p.flags & kBetaFloat);
        if (p.flags & kBetaLogits) beta = sigmoid(beta) * p.beta_scale;
    }
    const Gates gates(p, w.head, 4 * lane);
    copy_initial(p, w);
    if (blockIdx.y == 0) return;

    Quad y{kStart, kStart, kStart, kStart};
    float limit = kStart;
    int seam = most > 0 ? kOpen : -1;
    for (int batch = 0; seam == kOpen; batch++) {
        const int i = batch * kBatch + chunk;
        if (i < most) {
            barrier_wait(landed + 8 * chunk, batch & 1);
            prepare_group(p, factors + warp * kGroupBytes, tiles + chunk * kTileBytes,
                          tiles + chunk * kTileBytes + kKeyBytes, gates, lane, group * kGroup,
                          __shfl_sync(kAllLanes, beta, batch * kGroup + lane % kGroup),
                          segment_rows - (w.first_chunk - i - 1) * kChunk);
        }
        __syncthreads();
        if (warp == 0) {
            auto all_below = [&](float x) { return __all_sync(kAllLanes, y.x < x && y.y < x && y.z < x && y.w < x); };
            for (int c = 0; c < kBatch && seam == kOpen; c++) {
                const int walked = batch * kBatch + c + 1;
#pragma unroll
                for (int g = kGroups - 1; g >= 0; g--) y = walk_group(y, factors + (c * kGroups + g) * kGroupBytes, lane);
                limit *= kLeast;
                if (all_below(kForgotten))
                    seam = walked;
                else if (walked == most || !all_below(limit))
                    seam = -1;
            }
            if (lane == 0) {
                verdict = seam;
                if (seam == kOpen) load_batch(batch + 1);  // and no copy is on its way when the block ends
            }
        }
        __syncthreads();
        seam = verdict;
    }
    if (threadIdx.x == 0) p.seams[seam_index(p, w.segment, blockIdx.y, w.head)] = seam;
}
