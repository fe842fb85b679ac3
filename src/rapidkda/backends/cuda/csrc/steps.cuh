// What replay.cu works with: tables, rows of inputs, states between pool, ring and registers, sums over lanes.
//
// A row of 128 channels lies across a warp: lane l has channels 4 l to 4 l + 3.
#pragma once
#include "copy.cuh"
#include "log_decay.cuh"
#include "shared.cuh"

constexpr int kMatrix = 128 * 128;      // elements of a head's state
constexpr int kRecord = 3 * 128;        // floats of a record: k | log decay | correction
constexpr float kNormEpsilon = 1e-6f;

// An entry of a table. kEarly: one that a kernel before this one may still write; what is read is a hint then, and must
// not stay in the L1 cache, where the true one would be looked for.
template <bool kEarly = false>
DEVICE int load_int(const int* from) {
    if (!kEarly) return *from;
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0,[%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
// An entry of 32 or of 64 bits as it lies there: to widen it at once would wait for it.
template <bool kEarly = false>
DEVICE Words2 load_index(const void* table, i64 at, bool is_64) {
    const int* from = static_cast<const int*>(table) + (is_64 ? 2 * at : at);
    const u32 low = load_int<kEarly>(from);
    return Words2{low, is_64 ? static_cast<u32>(load_int<kEarly>(from + 1)) : 0};
}
DEVICE i64 widen_index(Words2 x, bool is_64) {
    return is_64 ? static_cast<i64>(static_cast<u64>(x.y) << 32 | x.x) : static_cast<int>(x.x);
}

// A row of the pool, or -1 where the slot is the padding marker or outside the pool.
DEVICE int pool_row(const StepParams& p, i64 slot) {
    return slot == p.pad_slot || slot < 0 || slot >= p.pool_rows ? -1 : static_cast<int>(slot);
}

// A segment's tokens. Values that the host could not check are brought into range.
struct Tokens {
    int first, count;
};
DEVICE Tokens segment_tokens(const StepParams& p, int first_token, int length) {
    const int first = min(max(first_token, 0), p.tokens);
    return Tokens{first, min(min(max(length, 0), p.positions), p.tokens - first)};
}

// How many records of a segment's last verification count.
DEVICE int accepted_count(const StepParams& p, i64 count) {
    return static_cast<int>(count < 0 ? 0 : count > p.positions ? p.positions : count);
}

// Four neighbouring elements.
DEVICE Quad load_four(const void* base, i64 at, bool is_float, bool vectors) {
    if (!vectors)
        return Quad{load_element(base, at, is_float), load_element(base, at + 1, is_float),
                    load_element(base, at + 2, is_float), load_element(base, at + 3, is_float)};
    if (is_float) return *reinterpret_cast<const Quad*>(static_cast<const float*>(base) + at);
    const Words2 x = *reinterpret_cast<const Words2*>(static_cast<const u16*>(base) + at);
    return Quad{low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y)};
}
DEVICE void store_four(float* base, i64 at, Quad x, bool vectors) {
    if (vectors) {
        *reinterpret_cast<Quad*>(base + at) = x;
    } else {
        base[at] = x.x, base[at + 1] = x.y, base[at + 2] = x.z, base[at + 3] = x.w;
    }
}

DEVICE Quad operator*(Quad x, Quad y) { return Quad{x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w}; }
DEVICE Quad operator*(Quad x, float y) { return Quad{x.x * y, x.y * y, x.z * y, x.w * y}; }
DEVICE float dot(Quad x, Quad y) { return fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, x.w * y.w))); }
DEVICE Quad natural_exp(Quad x) {
    return Quad{natural_exp(x.x), natural_exp(x.y), natural_exp(x.z), natural_exp(x.w)};
}

// Half of the sums that a lane has in part go to the lane 2 kHalf away, which sends it its share of the others.
template <int kHalf>
DEVICE void share_sums(float* x, int lane) {
    const bool high = lane & (2 * kHalf);
#pragma unroll
    for (int i = 0; i < kHalf; i++) {
        const float sent = high ? x[i] : x[i + kHalf], kept = high ? x[i + kHalf] : x[i];
        x[i] = kept + __shfl_xor_sync(kAllLanes, sent, 2 * kHalf);
    }
}
// kCount sums over kLanes neighbouring lanes; lane l receives that of x[l / 2 % kCount]. Overwrites x.
template <int kCount, int kLanes = 32>
DEVICE float warp_sums(float* x, int lane) {
    if (kCount >= 16) share_sums<8>(x, lane);
    if (kCount >= 8) share_sums<4>(x, lane);
    if (kCount >= 4) share_sums<2>(x, lane);
    if (kCount >= 2) share_sums<1>(x, lane);
    float sum = x[0] + __shfl_xor_sync(kAllLanes, x[0], 1);
#pragma unroll
    for (int distance = 2 * kCount; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    return sum;
}

// Rows of a token and a head.
DEVICE float load_value(const StepParams& p, i64 token, int head, int row) {
    return load_bf16(p.v + token * p.v_token_stride + head * p.v_head_stride + row);
}
DEVICE float write_strength(const StepParams& p, i64 token, int head) {
    const float x =
        load_element(p.beta, token * p.beta_token_stride + head * p.beta_head_stride, p.flags & kBetaFloat);
    return p.flags & kBetaLogits ? sigmoid(x) * p.beta_scale : x;
}
DEVICE void store_output(const StepParams& p, i64 token, int head, int row, float x) {
    p.out[token * p.out_token_stride + head * p.out_head_stride + row] = static_cast<u16>(pack_bf16(x, 0.f));
}

// x, of which the assembler knows nothing: addresses that follow from it are not computed ahead of the rare branch that
// needs them, where they would take the registers of the usual one.
DEVICE i64 opaque(i64 x) {
    asm volatile("" : "+l"(x));
    return x;
}

// How far apart rows and channels of a pool lie, in elements.
struct Steps {
    i64 row, channel;
};
DEVICE Steps pool_steps(const StepParams& p) {
    return p.flags & kStateVFirst ? Steps{opaque(128), opaque(1)} : Steps{opaque(1), opaque(128)};
}

// Rows of a head's state, 16 a warp; `offset`: elements from the pool's base to its matrix.
//
// In shared memory they lie in groups of neighbours, each of which one bulk copy brings, and groups a part of a line out
// of step. Rows of a product are taken from the groups in turn, so that lanes that read at once meet in no bank.
template <bool kFloat>
struct States {
    static constexpr int kRows = 16, kGroups = kFloat ? 2 : 4, kGroupRows = kRows / kGroups;
    static constexpr int kRowBytes = 128 * (kFloat ? 4 : 2), kGroupPitch = kGroupRows * kRowBytes + 128 / kGroups;
    static constexpr int kBytes = kGroups * kGroupPitch;
    static constexpr int kUpper = 8 / kGroups;  // from row g of a product to row g + 8, in rows of the state

    // The state's row that is row g < 8 of a product, and where it lies in shared memory.
    DEVICE static int row(int g) { return g / kGroups + g % kGroups * kGroupRows; }
    DEVICE static int place(int g) { return g / kGroups * kRowBytes + g % kGroups * kGroupPitch; }

    // Brings a warp's rows, from `row` on, into shared memory; completes on `bar`, which expects a warp's arrivals.
    // Without kVectorStates the copy engine cannot read them, and the warp itself does.
    DEVICE static void fetch(const StepParams& p, u32 to, i64 offset, int row, u32 bar, int lane) {
        if (p.flags & kVectorStates) {
            const char* from = static_cast<const char*>(p.pool) + (offset + row * 128) * (kFloat ? 4 : 2);
            if (lane == 0) {
                barrier_expect(bar, kRows * kRowBytes);
#pragma unroll
                for (int i = 0; i < kGroups; i++)
                    copy_bytes(to + i * kGroupPitch, from + i * kGroupRows * kRowBytes, kGroupRows * kRowBytes, bar);
            } else if (arrives(lane)) {
                barrier_arrive(bar);
            }
            __syncwarp();
            return;
        }
        const Steps step = pool_steps(p);
#pragma unroll 1
        for (int r = 0; r < kRows; r++) {
            const i64 at = offset + (row + r) * step.row + 4 * lane * step.channel;
            const u32 row_to = to + r / kGroupRows * kGroupPitch + r % kGroupRows * kRowBytes;
            Quad x;
            x.x = load_element(p.pool, at, kFloat), x.y = load_element(p.pool, at + step.channel, kFloat);
            x.z = load_element(p.pool, at + 2 * step.channel, kFloat);
            x.w = load_element(p.pool, at + 3 * step.channel, kFloat);
            if (kFloat)
                store_shared_quad(row_to + 16 * lane, x);
            else
                store_shared_words2(row_to + 8 * lane, pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
        }
        __syncwarp();
        if (arrives(lane)) barrier_arrive(bar);
    }

    // What `fetch` will bring, into the L2 cache; one lane, only with kVectorStates.
    DEVICE static void prefetch(const StepParams& p, i64 offset, int row) {
        prefetch_bytes(static_cast<const char*>(p.pool) + (offset + row * 128) * (kFloat ? 4 : 2), kRows * kRowBytes);
    }

    // Channels 4 n to 4 n + 3 of a row in shared memory.
    DEVICE static Quad load(u32 row, int n) {
        if (kFloat) return load_shared_quad(row + 16 * n);
        const Words2 x = load_shared_words2(row + 8 * n);
        return Quad{low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y)};
    }

    DEVICE static void put(u32 row, int n, Quad x) {
        if (kFloat)
            store_shared_quad(row + 16 * n, x);
        else
            store_shared_words2(row + 8 * n, pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
    }

    // The way back of `fetch`, by one lane, once all lanes' stores are fenced.
    DEVICE static void write(const StepParams& p, u32 from, i64 offset, int row) {
        char* to = static_cast<char*>(p.pool) + (offset + row * 128) * (kFloat ? 4 : 2);
#pragma unroll
        for (int i = 0; i < kGroups; i++)
            write_bytes(to + i * kGroupRows * kRowBytes, from + i * kGroupPitch, kGroupRows * kRowBytes);
        commit_writes();
    }

    DEVICE static void store_vector(const StepParams& p, i64 offset, int row, int n, Quad x) {
        const i64 at = offset + row * 128 + 4 * n;
        if (kFloat)
            store_once(static_cast<float*>(p.pool) + at, x);
        else
            store_once(static_cast<u16*>(p.pool) + at, Words2{pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)});
    }
    DEVICE static void store(const StepParams& p, i64 offset, int row, int n, Quad x) {
        if (p.flags & kVectorStates) {
            store_vector(p, offset, row, n, x);
            return;
        }
        const Steps step = pool_steps(p);
        const i64 at = offset + row * step.row + 4 * n * step.channel;
        store_element(p.pool, at, kFloat, x.x), store_element(p.pool, at + step.channel, kFloat, x.y);
        store_element(p.pool, at + 2 * step.channel, kFloat, x.z);
        store_element(p.pool, at + 3 * step.channel, kFloat, x.w);
    }
};
