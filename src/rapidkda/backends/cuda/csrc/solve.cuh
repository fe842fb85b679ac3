// (I + L)^-1 of a 16 x 16 unit lower triangular matrix in fp32, by forward substitution in blocks. Products of powers
// of L in half precision lose everything for near-collinear keys; substitution does not.
#pragma once
#include "layout.cuh"
#include "row_scale.cuh"

// Scratch of a producer group.
struct Scratch {
    static constexpr int lower = 0;  // L^T fp32, [j][i], rows padded to 20 floats; only i > j is read
    static constexpr int lower_row = 80;
    static constexpr int beta = lower + 64;  // of token i, in row i's padding: of four chunks in turn
    static constexpr int scales = 1280;      // two sets, for chunks in turn: fp32 [16] of k, then of q (row_scale.cuh)
    static constexpr int scales_bytes = 128;
    static constexpr int strong = scales + 2 * scales_bytes;  // which writes are strong, of four chunks: bits of tokens
    static constexpr int bytes = strong + 16;
};

DEVICE u32 lower_entry(u32 scratch, int i, int j) { return scratch + Scratch::lower + j * Scratch::lower_row + i * 4; }

// This lane's entries of L: rows g and g + 8 of columns 2q and 2q + 1, then row g + 8 of columns 8 + 2q and 9 + 2q.
struct LowerEntries {
    float l[6];
};
DEVICE void store_lower(u32 scratch, int lane, LowerEntries x) {
    const int g = lane >> 2, c = 2 * (lane & 3);
    const u32 to = lower_entry(scratch, g, c);
    constexpr int next = Scratch::lower_row;
    store_shared_float(to, x.l[0]);
    store_shared_float(to + next, x.l[1]);
    store_shared_float(to + 32, x.l[2]);
    store_shared_float(to + next + 32, x.l[3]);
    store_shared_float(to + 8 * next + 32, x.l[4]);
    store_shared_float(to + 9 * next + 32, x.l[5]);
}

// Whether one of this lane's entries of L is large. Nothing above the diagonal counts; there, products may be anything.
DEVICE bool alike(int lane, LowerEntries x) {
    const int g = lane >> 2, c = 2 * (lane & 3);
    auto large = [](float a, float b) { return fmaxf(fabsf(a), fabsf(b)) > Exact::kAlike; };
    return large(x.l[2], x.l[3]) | (g > c & large(x.l[0], x.l[4])) | (g > c + 1 & large(x.l[1], x.l[5]));
}
// How many tokens there are from the first of this lane's rows with a large entry on: no token depends on a later one,
// not even in its rounding.
DEVICE u32 tokens_alike(int lane, LowerEntries x) {
    const int g = lane >> 2;
    if (alike(lane, LowerEntries{{x.l[0], x.l[1]}})) return kChunk - g;
    return alike(lane, x) ? kChunk - 8 - g : 0;
}
// The chunk's marks (layout.cuh, Exact), where there are any. alike: the warp's largest; strong: bits of tokens with
// strong writes.
DEVICE void store_marks(u32 stage, int lane, u32 alike, u32 strong, bool low_keys) {
    if (lane >= 4) return;
    const u32 most_strong = strong ? kChunk + 1 - __ffs(strong) : 0;
    store_shared(stage + Stage::decay + lane * Stage::lane_row + Stage::exact,
                 max(alike, most_strong) + (strong && low_keys ? Exact::kLowKeys : 0));
}

// Write strengths of this lane's rows of L, g and g + 8, and of its columns of the inverse.
struct Strengths {
    float row, row8, column, column_below;
};
DEVICE Strengths load_strengths(u32 betas, int lane) {
    auto of = [&](int token) { return load_shared_float(betas + token * Scratch::lower_row); };
    return Strengths{of(lane >> 2), of((lane >> 2) + 8), of(lane & 15), of(lane & 7)};
}

// The scales that turn raw products <k_i, k_j> into L: rows g and g + 8 (times strengths), columns 2q, 2q + 1 and 8 +
// those.
struct LowerScales {
    float row, row8;
    Quad columns;
};
// From this lane's entry of the diagonals of the products, where it has one: scales of the keys g and g + 8, 1 / |k_i|
// under the L2 norm. They go into the scratch and, times `down`, into the stage; lanes have those of L from each other.
DEVICE LowerScales lower_scales(u32 scales, u32 stage, float diagonal, float diagonal8, int lane, int rows, bool l2norm,
                                float down, const Strengths& beta) {
    const int g = lane >> 2, q = lane & 3;
    float own = l2norm ? inverse_sqrt(diagonal + 1e-6f) : 1.f, own8 = l2norm ? inverse_sqrt(diagonal8 + 1e-6f) : 1.f;
    if (g >= rows) own = 0.f;
    if (g + 8 >= rows) own8 = 0.f;
    const int row = (lane & 28) + (g >> 1), column = 9 * q;  // lanes with the entries of g, of 2q; of 2q + 1: 4 further
    const LowerScales y{
        __shfl_sync(kAllLanes, own, row) * beta.row, __shfl_sync(kAllLanes, own8, row) * beta.row8,
        Quad{__shfl_sync(kAllLanes, own, column), __shfl_sync(kAllLanes, own, column + 4),
             __shfl_sync(kAllLanes, own8, column), __shfl_sync(kAllLanes, own8, column + 4)}};
    if (lane == row) {
        const u32 to = scales + q * 16 + (g & 1) * 4;
        const u32 stage_to = stage + Stage::decay + q * Stage::lane_row + Stage::key_scale + (g & 1) * 4;
        store_shared_float(to, own);
        store_shared_float(to + 8, own8);
        store_shared_float(stage_to, own * down);
        store_shared_float(stage_to + 8, own8 * down);
    }
    return y;
}

constexpr u32 kHalfTf32 = 0x1000u;  // added to the bits of an fp32, it makes cutting to tf32 rounding

// Diag(key scale) (I + L)^-1 Diag(beta): the consumers multiply raw keys, so the rows carry their scale. By blocks of 8:
// A and D, the inverses of the diagonal ones, by substitution, side by side; below them X = -D C A, C the block of L.
// scales: of the keys.
DEVICE void solve_and_store(u32 stage, u32 scratch, u32 scales, int lane, const Strengths& beta) {
    constexpr int row = Scratch::lower_row;
    const u32 lower = scratch + Scratch::lower;
    // Lanes j and 16 + j: column j % 8 of a diagonal block, and rows 0..3 or 4..7 of it in place of L's.
    const int j = lane & 7, block = (lane >> 3) & 1, half = lane >> 4;
    const u32 diagonal = lower + block * (8 * row + 32);
    float x[8];
#pragma unroll
    for (int m = 0; m < 8; m++) x[m] = m == j ? 1.f : 0.f;
#pragma unroll
    for (int m = 0; m < 7; m++) {
#pragma unroll
        for (int c = (m + 1) / 4; c < 2; c++) {
            const Quad l = load_shared_quad(diagonal + m * row + c * 16);
            if (4 * c > m) x[4 * c] = fmaf(-l.x, x[m], x[4 * c]);
            if (4 * c + 1 > m) x[4 * c + 1] = fmaf(-l.y, x[m], x[4 * c + 1]);
            if (4 * c + 2 > m) x[4 * c + 2] = fmaf(-l.z, x[m], x[4 * c + 2]);
            if (4 * c + 3 > m) x[4 * c + 3] = fmaf(-l.w, x[m], x[4 * c + 3]);
        }
    }
    const Quad own{half ? x[4] : x[0], half ? x[5] : x[1], half ? x[6] : x[2], half ? x[7] : x[3]};
    __syncwarp();
    store_shared_quad(diagonal + j * row + half * 16, own);
    __syncwarp();
    // Lane 8 r + j: rows 2 r and 2 r + 1 of column j of C A, then of X.
    const u32 pair = (lane >> 3) * 8;
    auto multiply = [&](u32 rows, u32 column) {  // transposed: `rows` of the first matrix, a column of the second
        const Quad low = load_shared_quad(column), high = load_shared_quad(column + 16);
        const float y[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        Pair sum{0.f, 0.f};
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const Pair a = load_shared_pair(rows + m * row);
            sum.x = fmaf(a.x, y[m], sum.x);
            sum.y = fmaf(a.y, y[m], sum.y);
        }
        return sum;
    };
    const u32 products = lower + (8 + j) * row;  // a place that L has no use for
    const Pair y = multiply(lower + 32 + pair, lower + j * row);
    store_shared_pair(products + pair, y.x, y.y);
    __syncwarp();
    const Pair below = multiply(lower + 8 * row + 32 + pair, products);

    auto store = [&](u32 at, Pair y, float strength, Pair scale) {  // two rows
        store_shared(at, __float_as_uint(y.x * strength * scale.x) + kHalfTf32);
        store_shared(at + 64, __float_as_uint(y.y * strength * scale.y) + kHalfTf32);
    };
    const u32 to = stage + Stage::inverse + (j >> 1) * 16 + (j & 1) * 4, at = to + block * Stage::inverse_last + half * 256;
    const u32 scale = scales + half * 32 + block * 8;
    store(at, Pair{own.x, own.y}, beta.column, load_shared_pair(scale));
    store(at + 128, Pair{own.z, own.w}, beta.column, load_shared_pair(scale + 16));
    store(to + 8 + pair * 16, below, -beta.column_below, load_shared_pair(scales + pair * 2 + 8));
}
