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
// least normal number of fp32, or
// kRemembers where that takes more than Seam::most_warm_up chunks: then the part needs its exact start.
// NaNs compare false and take the exact way, and so does everything where keys are not normalised here: with longer keys
// the tokens after the seam could make something of nothing.
#pragma once
#include "gate.cuh"
#include "parts.cuh"
#include "shared.cuh"

struct Seam {
    static constexpr int group = 4, groups = kChunk / group;  // tokens that a warp prepares; warps a chunk
    static constexpr int batch = 2, batches = 4;              // chunks that are walked between two barriers; at most
    static constexpr int most_warm_up = batch * batches;
    static constexpr int threads = 32 * groups * batch;  // that walk
    static constexpr float start = 0x1p64f, forgotten = 0x1p-62f;
    static constexpr float least = 0x1p-8f, log2_least = -8.f;  // a chunk, or the walk is given up
    static constexpr int key_bytes = 4096;
    static constexpr int group_bytes = 9 * 512 + 32;
    // A named barrier of those that walk; of a share's producers, who work beside them, none.
    static constexpr int barrier = 13;
};
// A chunk that is walked, in shared memory: keys, gates, its groups' factors.
template <bool kGateFloat>
struct Walk {
    static constexpr int gates = Seam::key_bytes, factors = gates + (kGateFloat ? 8192 : 4096);
    // Of tiles. Beside bf16 gates there are two more than are walked at once, so that the next ones come meanwhile.
    static constexpr int places = kGateFloat ? Seam::batch : 2 * Seam::batch;
    static constexpr int chunk_bytes = (factors + Seam::groups * Seam::group_bytes + 1023) / 1024 * 1024;
};

// log2 decays of this lane's four channels from their logits.
template <bool kBounded>
struct Gates : GateChannels {
    bool raw;

    DEVICE Gates(const Params& p, int head, int channel)
        : GateChannels(gate_channels(p, head, channel, kBounded)), raw(p.flags & kRawGate) {}
    DEVICE float log2_decay(float g, int channel) const {
        if (kBounded) return bound * bounded_fraction(g, bias[channel], amplitude);
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
template <bool kGateFloat, class GatesOfLane>
DEVICE void prepare_group(u32 to, u32 keys, u32 logits, const GatesOfLane& gates, int lane, int first, float beta,
                          int rows) {
    Quad k[Seam::group], keep[Seam::group], move[Seam::group];
    float norms[Seam::group];
#pragma unroll
    for (int t = 0; t < Seam::group; t++) {
        k[t] = load_bf16_channels(keys, first + Seam::group - 1 - t, lane);
        norms[t] = dot(k[t], k[t]);
    }
    warp_sums(norms);
#pragma unroll
    for (int t = 0; t < Seam::group; t++) {
        const int token = first + Seam::group - 1 - t;
        const bool exists = token < rows;
        const Quad g = kGateFloat ? load_float_channels(logits, token, lane)
                                            : load_bf16_channels(logits, token, lane);
        auto decay = [&](float x, int c) { return exists ? exp2_approx(gates.log2_decay(x, c)) : 1.f; };
        const Quad e{decay(g.x, 0), decay(g.y, 1), decay(g.z, 2), decay(g.w, 3)};
        const float scale = inverse_sqrt(norms[t] + 1e-6f), b = __shfl_sync(kAllLanes, beta, Seam::group - 1 - t);
        auto magnitude = [&](float x) { return exists ? fabsf(x * scale) : 0.f; };
        k[t] = Quad{magnitude(k[t].x), magnitude(k[t].y), magnitude(k[t].z), magnitude(k[t].w)};
        const Quad bk{b * k[t].x, b * k[t].y, b * k[t].z, b * k[t].w};
        keep[t] = e * Quad{fabsf(1.f - bk.x * k[t].x), fabsf(1.f - bk.y * k[t].y), fabsf(1.f - bk.z * k[t].z),
                           fabsf(1.f - bk.w * k[t].w)};
        move[t] = e * Quad{fabsf(bk.x), fabsf(bk.y), fabsf(bk.z), fabsf(bk.w)};
    }
    const u32 own = to + lane * 16;
    float products[Seam::group * (Seam::group - 1) / 2];
#pragma unroll
    for (int t = 0; t < Seam::group; t++) {
        Quad read = k[t], write = move[t];
#pragma unroll
        for (int u = t - 1; u >= 0; u--) {
            products[t * (t - 1) / 2 + u] = dot(read, move[u]);
            read = read * keep[u];
        }
#pragma unroll
        for (int u = t + 1; u < Seam::group; u++) write = write * keep[u];
        store_shared_quad(own + t * 512, read);
        store_shared_quad(own + (Seam::group + t) * 512, write);
    }
    store_shared_quad(own + 8 * 512, keep[0] * keep[1] * (keep[2] * keep[3]));
    warp_sums(products);
    if (lane != 0) return;
    store_shared_quad(to + 9 * 512, Quad{products[0], products[1], products[2], products[3]});
    store_shared_pair(to + 9 * 512 + 16, products[4], products[5]);
}
DEVICE Quad walk_group(Quad y, u32 from, int lane) {
    const u32 own = from + lane * 16;
    float s[Seam::group];
    Quad write[Seam::group];
#pragma unroll
    for (int t = 0; t < Seam::group; t++) s[t] = dot(load_shared_quad(own + t * 512), y);
    Quad next = load_shared_quad(own + 8 * 512) * y;
#pragma unroll
    for (int t = 0; t < Seam::group; t++) write[t] = load_shared_quad(own + (Seam::group + t) * 512);
    const Quad low = load_shared_quad(from + 9 * 512);        // (1, 0), (2, 0), (2, 1), (3, 0)
    const Pair high = load_shared_pair(from + 9 * 512 + 16);  // (3, 1), (3, 2)
    warp_sums(s);
    s[1] = fmaf(low.x, s[0], s[1]);
    s[2] = fmaf(low.z, s[1], fmaf(low.y, s[0], s[2]));
    s[3] = fmaf(high.y, s[2], fmaf(high.x, s[1], fmaf(low.w, s[0], s[3])));
#pragma unroll
    for (int t = 0; t < Seam::group; t++) next = add(next, write[t], s[t]);
    return next;
}

// A chunk's tiles into the L2 cache. One thread.
DEVICE void prefetch_values(const Params& p, const Work& w, int chunk) {
    const int token = w.first_token + chunk * kChunk;
    prefetch_tile(&p.v, token, 0, w.head);
    prefetch_tile(&p.v, token, 1, w.head);
}
DEVICE void prefetch_chunk(const Params& p, const Work& w, int chunk) {
    const int token = w.first_token + chunk * kChunk;
    prefetch_tile(&p.q, token, 0, w.head / p.group);
    prefetch_tile(&p.k, token, 0, w.head / p.group);
    prefetch_tile(&p.g, token, 0, w.head);
    prefetch_values(p, w, chunk);
}

// A seam to CTA `rank` of the cluster, where it completes on `bar`.
DEVICE void tell_seam(u32 to, u32 rank, int seam, u32 bar) {
    asm volatile(
        "{.reg .b32 d,b; mapa.shared::cluster.u32 d,%0,%1; mapa.shared::cluster.u32 b,%2,%1; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [d],%3,[b];}" ::"r"(to),
        "r"(rank), "r"(bar), "r"(seam)
        : "memory");
}

// A chunk in the middle of a head, by whose gates a head is walked or not: the same for all parts of the head, so that
// they agree on how it is divided.
struct Probe {
    int chunk;
    bool asked;  // else the head is not walked
    u32 room, landed;  // a tile of gates and 8 KB, aligned to 1024; a barrier, one arrival

    DEVICE Probe(const Params& p, const Work& w, u32 room, u32 landed)
        : chunk(w.chunks / 2), asked((p.flags & kL2Norm) && w.chunks > 0), room(room), landed(landed) {}
};
// One thread.
template <bool kGateFloat>
DEVICE void ask_for_probe(const Params& p, const Work& w, const Probe& probe) {
    if (!probe.asked) return;
    barrier_expect(probe.landed, kGateFloat ? 8192 : 4096);
    copy_tile(probe.room, &p.g, w.first_token + probe.chunk * kChunk, 0, w.head, probe.landed);
}

// Whether a head is walked: its gates in the probe are fast enough for it. All threads of a CTA, a token a warp.
template <bool kBounded, bool kGateFloat>
DEVICE bool forgets(const Params& p, const Work& w, const Probe& probe) {
    const u32 shared = probe.room, sums = shared + (kGateFloat ? 8192 : 4096);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, probed = probe.chunk;
    if (!probe.asked) return false;
    const Gates<kBounded> gates(p, w.head, 4 * lane);
    barrier_wait_together(probe.landed, 0);
    const Quad g = kGateFloat ? load_float_channels(shared, warp, lane) : load_bf16_channels(shared, warp, lane);
    const float exists = probed * kChunk + warp < w.rows ? 1.f : 0.f;
    store_shared_quad(sums + warp * 512 + lane * 16,
                      Quad{exists * gates.log2_decay(g.x, 0), exists * gates.log2_decay(g.y, 1),
                           exists * gates.log2_decay(g.z, 2), exists * gates.log2_decay(g.w, 3)});
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int token = 0; token < kChunk; token++)
        sum += load_shared_float(sums + token * 512 + (threadIdx.x & 127) * 4);
    fence_async_proxy();  // before copies over what was read
    return __syncthreads_and(sum < Seam::log2_least);
}

// A walk back from chunk `begin` of a head: chunk i before the seam begins at token first_token + (begin - i - 1) kChunk,
// and at most Seam::most_warm_up of them are walked. room: of the first chunk of a batch, aligned to 1024, `stride`
// bytes from one to the next; ahead: of the tiles of the batch behind it, where there is any, `ahead_stride` bytes from
// one to the next; landed: barriers of the tiles' places, one arrival each.
template <bool kGateFloat>
struct Walked {
    using Place = Walk<kGateFloat>;
    int begin;
    u32 room;
    int stride;
    u32 ahead;
    int ahead_stride;
    u32 landed;

    DEVICE int most() const { return min(begin, Seam::most_warm_up); }
    DEVICE u32 tiles_of(int i) const {
        const int place = i % Place::places;
        return place < Seam::batch ? room + place * stride : ahead + (place - Seam::batch) * ahead_stride;
    }
    DEVICE u32 landed_of(int i) const { return landed + 8 * (i % Place::places); }
    DEVICE void wait_for(int i) const { barrier_wait_together(landed_of(i), i / Place::places & 1); }
    // Chunks from..to - 1, as far as there are any. One thread.
    DEVICE void load(const Params& p, const Work& w, int from, int to) const {
#pragma unroll 1
        for (int i = from; i < min(most(), to); i++) {
            const int token = w.first_token + (begin - i - 1) * kChunk;
            barrier_expect(landed_of(i), Place::factors);
            copy_tile(tiles_of(i), &p.k, token, 0, w.head / p.group, landed_of(i));
            copy_tile(tiles_of(i) + Place::gates, &p.g, token, 0, w.head, landed_of(i));
        }
    }
};

// The seam, by Seam::threads threads; the first tiles, one for each place, have been asked for.
template <bool kBounded, bool kGateFloat>
DEVICE int walk(const Params& p, const Work& w, const Walked<kGateFloat>& walked) {
    __shared__ int verdict;  // the seam, or kOpen
    constexpr int kOpen = -3;
    using Place = Walk<kGateFloat>;
    constexpr int kPlaces = Place::places;
    const int begin = walked.begin, most = walked.most();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int chunk = warp / Seam::groups, group = warp % Seam::groups;
    if (most == 0) return kRemembers;
    // Lane 4 b + t holds the write strength of this warp's token t in batch b.
    const int row = (begin - lane / Seam::group * Seam::batch - chunk - 1) * kChunk + group * Seam::group +
                    lane % Seam::group;
    float beta = 0.f;
    if (lane < Seam::batches * Seam::group && row >= 0 && row < w.rows) {
        const i64 token = w.first_token + row;
        beta = load_element(p.beta, token * p.beta_token_stride + w.head * p.beta_head_stride, p.flags & kBetaFloat);
        if (p.flags & kBetaLogits) beta = sigmoid(beta) * p.beta_scale;
    }
    const Gates<kBounded> gates(p, w.head, 4 * lane);

    Quad y{Seam::start, Seam::start, Seam::start, Seam::start};
    float limit = Seam::start;
    int seam = kOpen;
    for (int batch = 0; seam == kOpen; batch++) {
        const int i = batch * Seam::batch + chunk;
        if (i < most) {
            walked.wait_for(i);
            const u32 tiles = walked.tiles_of(i), factors = walked.room + chunk * walked.stride + Place::factors;
            prepare_group<kGateFloat>(factors + group * Seam::group_bytes, tiles, tiles + Place::gates, gates, lane,
                                      group * Seam::group,
                                      __shfl_sync(kAllLanes, beta, batch * Seam::group + lane % Seam::group),
                                      w.rows - (begin - i - 1) * kChunk);
        }
        const int next = (batch + 1) * Seam::batch, ahead_of = batch * Seam::batch + kPlaces;  // chunks
        fence_async_proxy();  // reads of tiles, before copies over them
        named_barrier(Seam::barrier, Seam::threads);
        if (threadIdx.x == Seam::threads / 2) walked.load(p, w, ahead_of, ahead_of + Seam::batch);
        if (warp == 0) {
            auto all_below = [&](float x) { return __all_sync(kAllLanes, y.x < x && y.y < x && y.z < x && y.w < x); };
            for (int c = 0; c < Seam::batch && seam == kOpen; c++) {
                const int done = batch * Seam::batch + c + 1;
#pragma unroll
                for (int g = Seam::groups - 1; g >= 0; g--)
                    y = walk_group(y, walked.room + c * walked.stride + Place::factors + g * Seam::group_bytes, lane);
                limit *= Seam::least;
                if (all_below(Seam::forgotten))
                    seam = done;
                else if (done == most || !all_below(limit))
                    seam = kRemembers;
            }
            if (lane == 0) verdict = seam;
        }
        named_barrier(Seam::barrier, Seam::threads);
        seam = __shfl_sync(kAllLanes, verdict, 0);
        if (seam != kOpen)  // no copy is on its way at the end
            for (int c = next; c < min(most, ahead_of + Seam::batch); c++) walked.wait_for(c);
    }
    fence_async_proxy();  // reads and writes of all, before copies over them
    return seam;
}
