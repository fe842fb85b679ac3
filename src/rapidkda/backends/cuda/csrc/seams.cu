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

constexpr int kWarps = 4, kThreads = 32 * kWarps, kGroup = 4, kMostWarmUp = 8;
constexpr float kStart = 0x1p64f, kForgotten = 0x1p-62f;
constexpr int kFewestBits = 8;  // a chunk, or the walk is given up: slow gates are told apart in one step
constexpr int kKeyBytes = 4096, kGateBytes = 8192, kTileBytes = kKeyBytes + kGateBytes;
constexpr int kGroupBytes = 9 * 512 + 32, kFactorBytes = kWarps * kGroupBytes;
constexpr int kBytes = kMostWarmUp * kTileBytes + kFactorBytes + 1024;

struct LaunchInfo {
    int threads, shared_bytes, cluster;
};
extern "C" __constant__ const LaunchInfo launch_info = {kThreads, kBytes, 1};

// log2 decays of this lane's four channels from their logits.
struct Gates {
    float amplitude, bound, bias[4];
    bool bounded, raw;

    DEVICE Gates(const Params& p, int head, int channel) {
        const GateChannels first = gate_channels(p, head, channel), second = gate_channels(p, head, channel + 2);
        amplitude = first.amplitude;
        bound = first.bound;
        bias[0] = first.bias0;
        bias[1] = first.bias1;
        bias[2] = second.bias0;
        bias[3] = second.bias1;
        bounded = p.lower_bound < 0.f;
        raw = p.flags & kRawGate;
    }
    DEVICE float log2_decay(float g, int channel) const {
        if (bounded) return bound * bounded_fraction(g, bias[channel], amplitude);
        return raw ? softplus_log2_decay(g, bias[channel], amplitude) : fmaxf(g * kLog2E, kMinLog2Decay);
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

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(kAllLanes, x, offset);
    return x;
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
struct Betas {
    float of[kGroup];
};
DEVICE void prepare_group(const Params& p, u32 to, u32 keys, u32 logits, const Gates& gates, int lane, int first,
                          const Betas& beta, int rows) {
    Quad k[kGroup], keep[kGroup], move[kGroup];
#pragma unroll
    for (int t = 0; t < kGroup; t++) {
        const int token = first + kGroup - 1 - t;
        k[t] = load_bf16_channels(keys, token, lane);
        const Quad g = p.flags & kGateFloat ? load_float_channels(logits, token, lane)
                                            : load_bf16_channels(logits, token, lane);
        const float scale = inverse_sqrt(warp_sum(dot(k[t], k[t])) + 1e-6f);
        k[t] = k[t] * Quad{scale, scale, scale, scale};
        const bool exists = token < rows;
        auto decay = [&](float x, int c) { return exp2_approx(gates.log2_decay(x, c)); };
        const Quad e = exists ? Quad{decay(g.x, 0), decay(g.y, 1), decay(g.z, 2), decay(g.w, 3)} : Quad{1, 1, 1, 1};
        const float b = beta.of[kGroup - 1 - t];
        k[t] = exists ? Quad{fabsf(k[t].x), fabsf(k[t].y), fabsf(k[t].z), fabsf(k[t].w)} : Quad{0, 0, 0, 0};
        const Quad bk = k[t] * Quad{b, b, b, b};
        keep[t] = e * Quad{fabsf(1.f - bk.x * k[t].x), fabsf(1.f - bk.y * k[t].y), fabsf(1.f - bk.z * k[t].z),
                           fabsf(1.f - bk.w * k[t].w)};
        move[t] = e * Quad{fabsf(bk.x), fabsf(bk.y), fabsf(bk.z), fabsf(bk.w)};
    }
    const u32 own = to + lane * 16;
#pragma unroll
    for (int t = 0; t < kGroup; t++) {
        Quad read = k[t], write = move[t];
#pragma unroll
        for (int u = t - 1; u >= 0; u--) {
            const float product = warp_sum(dot(read, move[u]));
            if (lane == 0) store_shared_float(to + 9 * 512 + (t * (t - 1) / 2 + u) * 4, product);
            read = read * keep[u];
        }
#pragma unroll
        for (int u = t + 1; u < kGroup; u++) write = write * keep[u];
        store_shared_quad(own + t * 512, read);
        store_shared_quad(own + (kGroup + t) * 512, write);
    }
    store_shared_quad(own + 8 * 512, keep[0] * keep[1] * (keep[2] * keep[3]));
}
DEVICE Quad walk_group(Quad y, u32 from, int lane) {
    const u32 own = from + lane * 16;
    float s[kGroup];
#pragma unroll
    for (int t = 0; t < kGroup; t++) s[t] = dot(load_shared_quad(own + t * 512), y);
    Quad next = load_shared_quad(own + 8 * 512) * y;
    Quad write[kGroup];
#pragma unroll
    for (int t = 0; t < kGroup; t++) write[t] = load_shared_quad(own + (kGroup + t) * 512);
    const Quad low = load_shared_quad(from + 9 * 512);  // (1, 0), (2, 0), (2, 1), (3, 0)
    const Pair high = load_shared_pair(from + 9 * 512 + 16);  // (3, 1), (3, 2)
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
#pragma unroll
        for (int t = 0; t < kGroup; t++) s[t] += __shfl_xor_sync(kAllLanes, s[t], offset);
    s[1] = fmaf(low.x, s[0], s[1]);
    s[2] = fmaf(low.z, s[1], fmaf(low.y, s[0], s[2]));
    s[3] = fmaf(high.y, s[2], fmaf(high.x, s[1], fmaf(low.w, s[0], s[3])));
#pragma unroll
    for (int t = 0; t < kGroup; t++) next = add(next, write[t], s[t]);
    return next;
}

DEVICE void copy_initial(const Params& p, const Work& w) {
    const bool v_first = p.flags & kStateVFirst, is_float = p.flags & kInitialFloat;
    const int share = (128 * 128 + p.parts - 1) / p.parts, end = min((w.part + 1) * share, 128 * 128);
    const i64 from = w.read_slot * p.initial_stride + static_cast<i64>(w.head) * (128 * 128);
    float* to = p.starts + part_index(p, w, 0) * (128 * 128);
    constexpr int kAtOnce = 16;  // loads in flight
    for (int first = w.part * share + threadIdx.x; first < end; first += kAtOnce * kThreads) {
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
    __shared__ u64 landed_barriers[kMostWarmUp];
    __shared__ Work w;
    const u32 tiles = (shared_address(dynamic_shared) + 1023) & ~1023u, factors = tiles + kMostWarmUp * kTileBytes;
    const u32 landed = shared_address(landed_barriers);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (threadIdx.x == 0) {
        w = find_work(p, (blockIdx.z * p.parts + blockIdx.y) * p.value_heads + blockIdx.x, p.parts, false);
        for (int i = 0; i < kMostWarmUp; i++) barrier_init(landed + 8 * i, 1);
        barrier_init_fence();
        fence_async_proxy();
    }
    __syncthreads();
    if (w.padding) return;
    const i64 index = part_index(p, w, w.part);
    if (p.ready && threadIdx.x < 8) p.ready[index * 8 + threadIdx.x] = 0;

    // Chunk i before the part ends at its first token; the tokens of the segment before it.
    const int most = p.flags & kL2Norm ? min(w.first_chunk, kMostWarmUp) : 0;
    const int gate_bytes = p.flags & kGateFloat ? 8192 : 4096;
    if (threadIdx.x == 0)
        for (int i = 0; i < most; i++) {
            const int token = w.first_token - (i + 1) * kChunk;
            barrier_expect(landed + 8 * i, kKeyBytes + gate_bytes);
            copy_tile(tiles + i * kTileBytes, &p.k, token, 0, w.head / p.group, landed + 8 * i);
            copy_tile(tiles + i * kTileBytes + kKeyBytes, &p.g, token, 0, w.head, landed + 8 * i);
        }
    // Warp w prepares tokens 4 w .. 4 w + 3 of every chunk; lane l holds the write strength of token l % 4 of them, of
    // chunk l / 4.
    const int beta_token = w.first_token - (lane / 4 + 1) * kChunk + warp * kGroup + (lane & 3);
    const int segment_first = w.first_token - w.first_chunk * kChunk, segment_rows = w.first_chunk * kChunk + w.rows;
    float beta = 0.f;
    if (beta_token >= segment_first && beta_token < segment_first + segment_rows) {
        beta = load_element(p.beta, beta_token * p.beta_token_stride + w.head * p.beta_head_stride, p.flags & kBetaFloat);
        if (p.flags & kBetaLogits) beta = sigmoid(beta) * p.beta_scale;
    }
    copy_initial(p, w);
    if (w.part == 0) return;

    const Gates gates(p, w.head, 4 * lane);
    Quad y{kStart, kStart, kStart, kStart};
    float limit = kStart;
    int seam = -1;
    for (int i = 0; i < most; i++) {
        const u32 keys = tiles + i * kTileBytes, logits = keys + kKeyBytes;
        barrier_wait(landed + 8 * i, 0);
        Betas betas;
#pragma unroll
        for (int t = 0; t < kGroup; t++) betas.of[t] = __shfl_sync(kAllLanes, beta, i * kGroup + t);
        prepare_group(p, factors + warp * kGroupBytes, keys, logits, gates, lane, warp * kGroup, betas,
                      segment_rows - (w.first_chunk - i - 1) * kChunk);
        __syncthreads();
        // Every warp walks the same way, so that all agree.
#pragma unroll
        for (int group = kWarps - 1; group >= 0; group--) y = walk_group(y, factors + group * kGroupBytes, lane);
        auto all_below = [&](float x) { return __all_sync(kAllLanes, y.x < x && y.y < x && y.z < x && y.w < x); };
        if (all_below(kForgotten)) {
            seam = i + 1;
            break;
        }
        limit *= 1.f / (1 << kFewestBits);
        if (!all_below(limit)) break;
        __syncthreads();
    }
    if (threadIdx.x == 0) p.seams[index] = seam;
    for (int i = 0; i < most; i++) barrier_wait(landed + 8 * i, 0);  // no copy may land after the block has ended
}
