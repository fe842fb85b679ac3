// Sizes, registers of each role and the shared-memory map of replay.cu.
#pragma once
#include "mma.cuh"
#include "steps.cuh"

constexpr int kTokens = KDA_TOKENS;
constexpr bool kPrefetchStates = KDA_TOKENS == 2;  // into L2, two heads ahead; with more to do a head it only costs
constexpr bool kManyTurns = KDA_MANY_TURNS;  // a request may have more tokens or records than that
constexpr int kTiles = kTokens == 8 ? 2 : 1;  // of 8 columns: the keys' products, then the queries', of a chunk
constexpr int kOperandRows = 8 * kTiles;      // the first 2 kTokens of which are in use
using Rows = States<KDA_STATE_FLOAT>;
constexpr int kConsumers = 128 / Rows::kRows;
constexpr int kStages = KDA_STATE_FLOAT ? 2 : 4;  // heads whose states are on their way or at work
constexpr int kMakers = 4;                        // warps, which make the tables of a turn together
constexpr int kSets = kTokens == 8 ? 2 : 4;       // of tables
constexpr int kThreads = (kConsumers + kMakers) * 32;
// Registers a thread, moved between the roles at the start. setmaxnreg acts on whole warpgroups and hangs where the
// roles want more than the launch took.
constexpr int kLaunchRegisters = 168, kConsumerRegisters = 200, kMakerRegisters = 104;
static_assert(kConsumers * kConsumerRegisters + kMakers * kMakerRegisters <= kThreads / 32 * kLaunchRegisters);

// Rows in shared memory are this far apart so that no two of a warp's lanes meet in a bank.
constexpr int kOperandPitch = 128 * 4 + 64;  // bytes: lanes read four channels of eight rows
constexpr int kPair = kTokens == 8 ? 2 : 1;            // keys of records that lie side by side: c and c + 4
constexpr int kFoldPitch = 128 * 4 * kPair + 32;

// Tables, in bytes. Operands are TF32 numbers and what is left of fp32 (`rest`).
constexpr int kFold = 0;  // [4][128][kPair]: keys of records, decayed to the last
constexpr int kFoldRest = kFold + 4 * kFoldPitch;
constexpr int kDecay = kFoldRest + 4 * kFoldPitch;  // [128]: of the state under the records
constexpr int kOperands = kDecay + 128 * 4;  // [kOperandRows][128]: keys, queries, decayed from the state to their token
constexpr int kOperandsRest = kOperands + kOperandRows * kOperandPitch;
constexpr int kMix = kOperandsRest + kOperandRows * kOperandPitch;  // [kOperandRows][8]: M, W
constexpr int kMixRest = kMix + kOperandRows * 8 * 4;
constexpr int kSetBytes = kMixRest + kOperandRows * 8 * 4;

// Shared memory.
constexpr int kTables = 0;
// [5 kTokens][128]: keys, queries, decays of a turn; keys and decays of the records that it folds
constexpr int kTokenRows = kTables + kSets * kSetBytes;
constexpr int kShares = kTokenRows + 5 * kTokens * 128 * 4;  // [kTokens^2][kMakers]: of sums
constexpr int kRing = (kShares + kTokens * kTokens * 16 + 127) / 128 * 128;
constexpr int kFar = 2;                                    // heads whose states come to the L2 cache before that
constexpr int kWorkBytes = 32, kWorks = kStages + kFar + 2;  // heads that a consumer warp has found
constexpr int kLists = kRing + kConsumers * kStages * Rows::kBytes;
constexpr int kBarriers = kLists + kConsumers * kWorks * kWorkBytes;
constexpr int kMade = kBarriers + kConsumers * kStages * 8;  // after the barriers of the stages
constexpr int kUsed = kMade + kSets * 8;
constexpr int kBytes = kUsed + kSets * 8;
static_assert(kBytes + 128 <= 227 * 1024);

// x as a TF32 number and the rest of it.
DEVICE u32 tf32(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }
DEVICE u32 tf32_rest(float x, u32 head) { return __float_as_uint(x - __uint_as_float(head)); }

DEVICE void store_split(u32 head, u32 rest, Quad x) {
    const Words4 h = {tf32(x.x), tf32(x.y), tf32(x.z), tf32(x.w)};
    store_shared_words4(head, h);
    store_shared_words4(rest, Words4{tf32_rest(x.x, h.x), tf32_rest(x.y, h.y), tf32_rest(x.z, h.z),
                                     tf32_rest(x.w, h.w)});
}
