// Verification with a slot for the state after each draft: states are read once, ahead, by the copy engine, and written
// from registers.
//
//     S = S exp(g)      u = b (v - S k)      S = S + u k^T      o = scale S q        S [V, K]
//
// A CTA takes one head of one request after another. Maker warps turn the inputs of later tokens into tables in shared
// memory; consumer warps own kRows rows of the state each and have a ring of stages of their own for them, so that the
// rows of the next heads are on their way while they work.
//
// Compiled with KDA_STATE_FLOAT defined.
#include "steps.cuh"

constexpr int kConsumers = 8, kRows = 128 / kConsumers, kStages = 3;
constexpr int kMakers = 4;  // warps, each with a table; each makes every fourth token
constexpr int kThreads = (kConsumers + kMakers) * 32;
using Rows = States<KDA_STATE_FLOAT>;
constexpr int kStageBytes = kRows * Rows::kRowBytes;

// The table of a token, in bytes: fp32 vectors of 128, then the write strength and <k, q>.
constexpr int kKey = 0, kQuery = 512, kDecay = 1024, kValue = 1536, kStrength = 2048, kTableBytes = 2064;

// Shared memory.
constexpr int kTables = kConsumers * kStages * kStageBytes, kBarriers = kTables + kMakers * kTableBytes;
constexpr int kMade = kBarriers + kConsumers * kStages * 8;  // after the barriers of the stages
constexpr int kUsed = kMade + kMakers * 8;
constexpr int kBytes = kUsed + kMakers * 8;
static_assert(kBytes + 128 <= 227 * 1024);

struct LaunchInfo {
    int threads, shared_bytes, cluster;
};
extern "C" __constant__ const LaunchInfo launch_info = {kThreads, kBytes + 128, 1};

struct Request {
    int n = -1;
    Tokens tokens;
    int read;  // row of the pool that its state comes from, -1: padding
    DEVICE bool works() const { return read >= 0 && tokens.count > 0; }
};

// The row of the pool that a position of a request names, or -1.
DEVICE int position_row(const StepParams& p, int n, int position) {
    return pool_row(p, load_index(p.slots, n * p.slot_stride + position * p.position_stride, p.flags & kSlots64));
}

DEVICE Request find_request(const StepParams& p, int n) {
    Request r;
    r.n = n;
    r.tokens = segment_tokens(p, n);
    r.read = position_row(p, n, accepted_count(p, n, 1) - 1);
    return r;
}

// The next head from `unit` on that has a state to read; `end` if there is none.
DEVICE int find_head(const StepParams& p, Request& r, int unit, int end) {
    for (; unit < end; unit++) {
        const int n = unit / p.value_heads;
        if (n != r.n) r = find_request(p, n);
        if (r.works()) break;
    }
    return unit;
}

// ---- makers

DEVICE void make_table(const StepParams& p, i64 token, int head, u32 table, u32 used, int parity, int lane) {
    Quad k = load_key(p, token, head, lane), q = load_query(p, token, head, lane), g = load_gate(p, token, head, lane);
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] = load_value(p, token, head, 32 * i + lane);
    const float strength = write_strength(p, token, head);
    log_decays<1>(p, &g, head_gate(p, head, lane));
    float k_scale = 1.f, q_scale = p.scale;
    if (p.flags & kL2Norm) {
        k_scale = inverse_sqrt(warp_sum(dot(k, k)) + kNormEpsilon);
        q_scale *= inverse_sqrt(warp_sum(dot(q, q)) + kNormEpsilon);
    }
    k = k * k_scale, q = q * q_scale;
    const float kq = warp_sum(dot(k, q));
    barrier_wait(used, parity);
    store_shared_quad(table + kKey + 16 * lane, k);
    store_shared_quad(table + kQuery + 16 * lane, q);
    store_shared_quad(table + kDecay + 16 * lane, natural_exp(g));
#pragma unroll
    for (int i = 0; i < 4; i++) store_shared_float(table + kValue + 128 * i + 4 * lane, values[i]);
    if (lane == 0) store_shared_pair(table + kStrength, strength, kq);
}

DEVICE void make(const StepParams& p, u32 shared, int maker, int lane, int begin, int end) {
    Request request;
    int token = 0, parity = 1;  // token: of all heads; a fresh barrier counts as passed
    for (int unit = find_head(p, request, begin, end); unit < end; unit = find_head(p, request, unit + 1, end)) {
        for (int j = 0; j < request.tokens.count; j++) {
            if (token++ % kMakers != maker) continue;
            make_table(p, request.tokens.first + j, unit % p.value_heads, shared + kTables + maker * kTableBytes,
                       shared + kUsed + 8 * maker, parity, lane);
            parity ^= 1;
            __syncwarp();
            if (lane == 0) barrier_arrive(shared + kMade + 8 * maker);
        }
    }
}

// ---- consumers

// What a token does to every row of a head's state; the lane's channels of vectors.
struct Step {
    Quad k, q, decay;
    float strength, kq;  // kq: <k, q>
};

// One token on eight rows. value: v of row lane / 2 % 8. Returns its output in the lanes from 16 on.
DEVICE float advance(Quad* state, const Step& s, float value, int lane) {
    float sums[16];
#pragma unroll
    for (int r = 0; r < 8; r++) {
        state[r] = state[r] * s.decay;
        sums[r] = dot(state[r], s.k);
        sums[8 + r] = dot(state[r], s.q);
    }
    const float sum = sixteen_sums(sums, lane);
    const float correction = s.strength * (value - sum);
#pragma unroll
    for (int r = 0; r < 8; r++) state[r] = fma(s.k, __shfl_sync(kAllLanes, correction, 2 * r), state[r]);
    return fmaf(__shfl_xor_sync(kAllLanes, correction, 16), s.kq, sum);
}

// The reader of a consumer warp: its next head, and the stage that this goes to.
struct Reader {
    Request request;
    int unit, stage = 0;
    u32 ring, full;
};

// Asks for the rows of the next head that has a state to read.
DEVICE void fetch(const StepParams& p, Reader& r, int row, int end, int lane) {
    r.unit = find_head(p, r.request, r.unit, end);
    if (r.unit >= end) return;
    Rows::fetch(p, r.ring + r.stage * kStageBytes, Rows::kRowBytes,
                r.request.read * p.pool_stride + r.unit % p.value_heads * kMatrix, row, kRows, r.full + 8 * r.stage,
                lane);
    r.stage = r.stage + 1 == kStages ? 0 : r.stage + 1;
    r.unit++;
}

DEVICE void consume(const StepParams& p, u32 shared, int warp, int lane, int begin, int end) {
    const int row = warp * kRows, own = lane >> 1 & 7;  // own: of eight rows, the one whose sums this lane receives
    Reader reader;
    reader.unit = begin;
    reader.ring = shared + warp * kStages * kStageBytes, reader.full = shared + kBarriers + warp * kStages * 8;
#pragma unroll 1
    for (int i = 0; i < kStages; i++) fetch(p, reader, row, end, lane);

    Request request;
    int stage = 0, parity = 0, maker = 0, made_parity = 0;
    for (int unit = begin; unit < end; unit++) {
        const int n = unit / p.value_heads, head = unit - n * p.value_heads;
        if (n != request.n) request = find_request(p, n);
        const Tokens tokens = request.tokens;
        if (request.read < 0)
            for (int j = 0; j < tokens.count; j++)
                if (lane < kRows) store_output(p, tokens.first + j, head, row + lane, 0.f);
        if (!request.works()) continue;
        barrier_wait(reader.full + 8 * stage, parity);
        Quad state[kRows];
#pragma unroll
        for (int r = 0; r < kRows; r++)
            state[r] = Rows::load(reader.ring + stage * kStageBytes + r * Rows::kRowBytes, lane);
        __syncwarp();  // all of the stage is read
        stage = stage + 1 == kStages ? 0 : stage + 1;
        parity ^= stage == 0;
        fetch(p, reader, row, end, lane);
        for (int j = 0; j < tokens.count; j++) {
            const i64 token = tokens.first + j;
            const int target = position_row(p, n, j);
            const u32 table = shared + kTables + maker * kTableBytes;
            barrier_wait(shared + kMade + 8 * maker, made_parity);
            Step step;
            step.k = load_shared_quad(table + kKey + 16 * lane);
            step.q = load_shared_quad(table + kQuery + 16 * lane);
            step.decay = load_shared_quad(table + kDecay + 16 * lane);
            const Pair scalars = load_shared_pair(table + kStrength);
            step.strength = scalars.x, step.kq = scalars.y;
            float values[kRows / 8];
#pragma unroll
            for (int i = 0; i < kRows / 8; i++)
                values[i] = load_shared_float(table + kValue + 4 * (row + 8 * i + own));
            __syncwarp();  // all of the table is read
            if (lane == 0) barrier_arrive(shared + kUsed + 8 * maker);
            maker = maker + 1 == kMakers ? 0 : maker + 1;
            made_parity ^= maker == 0;
            const i64 offset = target * p.pool_stride + head * kMatrix;
#pragma unroll
            for (int i = 0; i < kRows / 8; i++) {
                const float out = advance(state + 8 * i, step, values[i], lane);
                if (lane >= 16 && !(lane & 1)) store_output(p, token, head, row + 8 * i + own, out);
                if (target < 0) continue;
                if (p.flags & kVectorStates) {
#pragma unroll
                    for (int r = 0; r < 8; r++) Rows::store_vector(p, offset, row + 8 * i + r, lane, state[8 * i + r]);
                } else {
#pragma unroll
                    for (int r = 0; r < 8; r++) Rows::store(p, offset, row + 8 * i + r, lane, state[8 * i + r]);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) slots(const __grid_constant__ StepParams p) {
    extern __shared__ u8 dynamic_shared[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(kAllLanes, threadIdx.x >> 5, 0);
    const u32 shared = (shared_address(dynamic_shared) + 127) & ~127u;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kConsumers * kStages; i++) barrier_init(shared + kBarriers + 8 * i, 1);
        for (int i = 0; i < kMakers; i++) {
            barrier_init(shared + kMade + 8 * i, 1);
            barrier_init(shared + kUsed + 8 * i, kConsumers);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const i64 heads = static_cast<i64>(p.segments) * p.value_heads;
    const int begin = static_cast<int>(heads * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(heads * (blockIdx.x + 1) / gridDim.x);
    if (warp < kConsumers)
        consume(p, shared, warp, lane, begin, end);
    else
        make(p, shared, warp - kConsumers, lane, begin, end);
}
