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
// NaNs compare false and take the exact way.
//
// Grid: (value heads, parts, segments). A block also copies its share of the segment's own state to `starts`, where the
// first part reads it: in place, the last part may have written the slot by then.
#include "gate.cuh"
#include "shared.cuh"
#include "work.cuh"

constexpr int kWarps = 4, kThreads = 32 * kWarps, kMostWarmUp = 8;
constexpr float kStart = 0x1p64f, kForgotten = 0x1p-62f;
constexpr int kFewestBits = 8;  // a chunk, or the walk is given up: slow gates are told apart in one step
constexpr int kKeyBytes = 4096, kGateBytes = 8192, kTileBytes = kKeyBytes + kGateBytes;
constexpr int kFactorBytes = 3 * kChunk * 128 * 4;
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
    const int before = w.first_chunk, most = min(before, kMostWarmUp), gate_bytes = p.flags & kGateFloat ? 8192 : 4096;
    if (threadIdx.x == 0)
        for (int i = 0; i < most; i++) {
            const int token = w.first_token - (i + 1) * kChunk;
            barrier_expect(landed + 8 * i, kKeyBytes + gate_bytes);
            copy_tile(tiles + i * kTileBytes, &p.k, token, 0, w.head / p.group, landed + 8 * i);
            copy_tile(tiles + i * kTileBytes + kKeyBytes, &p.g, token, 0, w.head, landed + 8 * i);
        }
    // Warp w prepares tokens w, w + 4, w + 8, w + 12 of every chunk; lane l holds the write strength of token l % 4 of
    // chunk l / 4.
    const int beta_token = w.first_token - (lane / 4 + 1) * kChunk + warp + (lane & 3) * kWarps;
    const int segment_first = w.first_token - w.first_chunk * kChunk, segment_rows = w.first_chunk * kChunk + w.rows;
    float beta = 0.f;
    if (beta_token >= segment_first && beta_token < segment_first + segment_rows) {
        beta = load_element(p.beta, beta_token * p.beta_token_stride + w.head * p.beta_head_stride, p.flags & kBetaFloat);
        if (p.flags & kBetaLogits) beta = sigmoid(beta) * p.beta_scale;
    }
    copy_initial(p, w);
    if (w.part == 0) return;

    const Gates gates(p, w.head, 4 * lane);
    float y[4] = {kStart, kStart, kStart, kStart}, limit = kStart;
    int seam = -1;
    for (int i = 0; i < most; i++) {
        const u32 keys = tiles + i * kTileBytes, logits = keys + kKeyBytes;
        barrier_wait(landed + 8 * i, 0);
#pragma unroll
        for (int t = 0; t < kChunk / kWarps; t++) {
            const int token = warp + t * kWarps;
            Quad k = load_bf16_channels(keys, token, lane);
            const Quad g = p.flags & kGateFloat ? load_float_channels(logits, token, lane)
                                                : load_bf16_channels(logits, token, lane);
            if (p.flags & kL2Norm) {
                const float scale = inverse_sqrt(warp_sum(k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w) + 1e-6f);
                k = Quad{k.x * scale, k.y * scale, k.z * scale, k.w * scale};
            }
            const float b = __shfl_sync(kAllLanes, beta, i * 4 + t);
            const bool exists = (w.first_chunk - i - 1) * kChunk + token < segment_rows;
            auto decay = [&](float x, int c) { return exp2_approx(gates.log2_decay(x, c)); };
            const Quad e = exists ? Quad{decay(g.x, 0), decay(g.y, 1), decay(g.z, 2), decay(g.w, 3)} : Quad{1, 1, 1, 1};
            if (!exists) k = Quad{0, 0, 0, 0};
            const u32 to = factors + token * 512 + lane * 16;
            store_shared_quad(to, Quad{e.x * fabsf(1.f - b * k.x * k.x), e.y * fabsf(1.f - b * k.y * k.y),
                                       e.z * fabsf(1.f - b * k.z * k.z), e.w * fabsf(1.f - b * k.w * k.w)});
            store_shared_quad(to + 8192, Quad{e.x * fabsf(b * k.x), e.y * fabsf(b * k.y), e.z * fabsf(b * k.z),
                                              e.w * fabsf(b * k.w)});
            store_shared_quad(to + 16384, Quad{fabsf(k.x), fabsf(k.y), fabsf(k.z), fabsf(k.w)});
        }
        __syncthreads();
        // Every warp walks the same way, so that all agree.
#pragma unroll
        for (int token = kChunk - 1; token >= 0; token--) {
            const u32 from = factors + token * 512 + lane * 16;
            const Quad keep = load_shared_quad(from), move = load_shared_quad(from + 8192);
            const Quad k = load_shared_quad(from + 16384);
            const float s = warp_sum(k.x * y[0] + k.y * y[1] + k.z * y[2] + k.w * y[3]);
            y[0] = fmaf(keep.x, y[0], move.x * s);
            y[1] = fmaf(keep.y, y[1], move.y * s);
            y[2] = fmaf(keep.z, y[2], move.z * s);
            y[3] = fmaf(keep.w, y[3], move.w * s);
        }
        auto all_below = [&](float x) {
            return __all_sync(kAllLanes, y[0] < x && y[1] < x && y[2] < x && y[3] < x);
        };
        if (all_below(kForgotten)) {
            seam = i + 1;
            break;
        }
        limit *= 1.f / (1 << kFewestBits);
        if (!all_below(limit)) break;
        __syncthreads();
    }
    if (threadIdx.x == 0) p.seams[index] = seam;
}
