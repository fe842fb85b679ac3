// Sizes, registers of each role and the shared-memory map of replay.cu.
#pragma once
#include "mma.cuh"
#include "steps.cuh"

constexpr int kTokens = KDA_TOKENS;
constexpr bool kPrefetchStates = KDA_TOKENS == 2;  // into L2, two heads ahead; with more to do a head it only costs
constexpr bool kManyTurns = KDA_MANY_TURNS;   // a request may have more tokens than that, or more records than kFolds
constexpr bool kDeferred = KDA_DEFERRED;      // states are stored only where records are full
constexpr int kFolds = KDA_FOLDS;             // records that a turn applies
constexpr int kGroups = (kFolds + 7) / 8;     // of records, as products take them
constexpr int kTiles = kTokens == 8 ? 2 : 1;  // of 8 columns: the keys' products, then the queries', of a chunk
constexpr int kOperandRows = 8 * kTiles;      // the first 2 kTokens of which are in use
using Rows = States<KDA_STATE_FLOAT>;
constexpr int kConsumers = 128 / Rows::kRows;
constexpr int kStages = KDA_STATE_FLOAT ? 2 : 4;  // heads whose states are on their way or at work
constexpr int kMakers = 8;  // warps, which make the tables of a turn together
constexpr int kSets = kTokens == 8 || kFolds > 8 ? 2 : 4;  // of tables
constexpr int kThreads = (kConsumers + kMakers) * 32;
// Registers a thread, moved between the roles at the start. setmaxnreg acts on whole warpgroups and hangs where the
// roles want more than the launch took.
constexpr int kLaunchRegisters = 128, kConsumerRegisters = kManyTurns ? 176 : 152;
constexpr int kMakerRegisters = 2 * kLaunchRegisters - kConsumerRegisters;
static_assert(kConsumers * kConsumerRegisters + kMakers * kMakerRegisters <= kThreads / 32 * kLaunchRegisters);

// Rows in shared memory are this far apart so that no two of a warp's lanes meet in a bank.
constexpr int kOperandPitch = 128 * 4 + 64;  // bytes: lanes read four channels of eight rows
constexpr int kPair = kFolds >= 8 ? 2 : 1;   // records of a group that a lane reads: c, and c + 4
constexpr int kFoldPitch = 128 * 4 + 32;
constexpr int kRowPitch = 128 * 4 + 32;

// Tables, in bytes. M and W are TF32 numbers and what is left of fp32 (`rest`).
constexpr int kFold = 0;  // [4 kPair kGroups][128]: keys of records, decayed to the last, in fp32
constexpr int kDecay = kFold + 4 * kPair * kGroups * kFoldPitch;  // [128]: of the state under the records
// [kOperandRows][32][2][4]: keys, queries, decayed from the state to their token; of four channels the heads in bfloat16,
// then what is left of them.
constexpr int kOperands = kDecay + 128 * 4;
constexpr int kMix = kOperands + kOperandRows * kOperandPitch;  // [kOperandRows][8]: M, W
constexpr int kMixRest = kMix + kOperandRows * 8 * 4;
constexpr int kSeen = kMixRest + kOperandRows * 8 * 4;  // [kGroups][kOperandRows][8]: what operands read of the records
constexpr int kSeenBytes = kDeferred && !kManyTurns ? kGroups * kOperandRows * 8 * 4 : 0;
constexpr int kSetBytes = kSeen + kSeenBytes;

// Shared memory.
constexpr int kTables = 0;
constexpr int kTokenRows = kTables + kSets * kSetBytes;        // [3 kTokens][128]: keys, queries, decays of a turn
constexpr int kPairs = kTokens * (kTokens + 1) / 2;            // of a token and one that it sees
constexpr int kShares = kTokenRows + 3 * kTokens * kRowPitch;  // [2 kPairs][kMakers]: of sums over channels
constexpr int kSeenShares = kShares + 2 * kPairs * kMakers * 4;  // [kMakers][as kSeen]
// Inputs of a head, asked for during the one before: of each token k, q and g; and of two heads dt_bias and A_log.
constexpr int kAsked = kSeenShares + kMakers * kSeenBytes, kAskedQ = 256, kAskedG = 512, kAskedBytes = 1024;
constexpr int kGate = kAsked + kTokens * kAskedBytes, kGateBytes = 128 * 4 + 16;
constexpr int kRing = (kGate + 2 * kGateBytes + 127) / 128 * 128;
constexpr int kFar = 2;  // heads whose states come to the L2 cache before that
// Heads of the list: so many in all; found ahead of the makers; past the end, which say so.
constexpr int kWorks = 64, kAhead = 16, kEnds = 8, kWorkBytes = 32;
static_assert(kAhead + 32 + kEnds + kSets + 1 <= kWorks && kStages + kFar < kEnds && kStages + kFar < kAhead);
constexpr int kList = kRing + kConsumers * kStages * Rows::kBytes;
constexpr int kBarriers = kList + kWorks * kWorkBytes;
constexpr int kMade = kBarriers + kConsumers * kStages * 8;  // after the barriers of the stages
constexpr int kMixed = kMade + kSets * 8;
constexpr int kUsed = kMixed + kSets * 8;
constexpr int kStarts = kUsed + kSets * 8;  // [kSets] of {head of the pool, row before its last records} for `held`
constexpr int kBytes = kStarts + kSets * 8;
static_assert(kBytes + 128 <= 227 * 1024);

// x as a TF32 number and the rest of it.
DEVICE u32 tf32(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }
DEVICE u32 tf32_rest(float x, u32 head) { return __float_as_uint(x - __uint_as_float(head)); }

// d += a b to nearly fp32; the operands in two parts each.
DEVICE void multiply(float* d, const u32* a, const u32* a_rest, u32 b0, u32 b1, u32 b0_rest, u32 b1_rest) {
    mma_tf32(d, a_rest, b0, b1);
    mma_tf32(d, a, b0_rest, b1_rest);
    mma_tf32(d, a, b0, b1);
}
