// Forms of the prefill kernel, and where everything lies in shared memory.
#pragma once
#include "barrier.cuh"
#include "scalar.cuh"

constexpr int kChunk = 16;  // tokens a step

// kWhole:      one CTA owns a head: 128 rows of the state (V), two consumer warpgroups.
// kPair:       a cluster of two CTAs owns a head, 64 rows of V each; each prepares every other chunk for both.
// kTransition: a cluster of two CTAs makes the affine transition of a part of a segment: rank 0 its B (zero state),
//              rank 1 its M (identity state, v = 0), 128 rows each, preparation shared as in kPair.
enum class Form { kWhole, kPair, kTransition };

// One stage: everything the consumers need of one chunk. Tiles have the 128-byte swizzle: [64-channel half][row][128
// B]. The part before `v` is made by the producers and, in a cluster, copied to the peer as it stands.
struct Stage {
    static constexpr int tiles = 0;         // [2 halves][kd 16 rows | qd 16 rows | kr 16 rows, fp16][128 B]
    static constexpr int half = 6144, kr = 4096;  // bytes of a half; within one
    // Tinv, fp32 with half a unit of tf32 added, by 8 x 8 blocks: lane (row, column / 2)'s words of rows 0..7, of rows
    // 8..15 with columns 0..7, then of rows 8..15 with columns 8..15 and nothing.
    static constexpr int inverse = 12288, inverse_last = 512;
    static constexpr int intra = 13312;     // Aqk, fp16 [2 column halves][16][8]
    // What lane q of four needs, fp32: exp(G_C) [16 n-tiles][2], then the scales of k and of q of tokens 2q, 2q + 1, 8 +
    // 2q, 9 + 2q, and the chunk's marks (Exact), four times, since a load by one address for all would end up in a uniform
    // register, which waits for it at once.
    static constexpr int decay = 13824;
    static constexpr int lane_row = 176;
    static constexpr int key_scale = 128, query_scale = 144, exact = 160;  // within a lane's row
    static constexpr int prepared = decay + 4 * lane_row;     // bytes copied to the peer
    static constexpr int v = 15360;          // [1 or 2 halves][16][128 B]
};

// Chunks whose products take their low parts too (recurrence.cuh): how many of the last tokens need them, 0 in nearly
// all chunks, and whether low parts of the update's keys are in the stage.
struct Exact {
    static constexpr float kStrong = 31.f / 32;  // write strengths above it: hardly anything is left of what they replace
    static constexpr float kAlike = 0.5f;        // entries of L above it: the keys are nearly the same
    static constexpr u32 kLowKeys = 32;          // added to the number of tokens
};

// kParts: runs are parts of segments (parts.cuh).
template <Form kForm_, bool kBounded_, bool kGateFloat_, bool kParts_, bool kConvolves_ = false, bool kNorms_ = false>
struct Config {
    static constexpr Form kForm = kForm_;
    static constexpr bool kBounded = kBounded_;      // bounded gate; else any log decay
    static constexpr bool kGateFloat = kGateFloat_;  // g is fp32, else bf16
    static constexpr bool kParts = kParts_;
    static constexpr bool kConvolves = kConvolves_;  // q, k, v come before their convolution: convolution.cuh
    static constexpr bool kNorms = kNorms_;          // outputs pass the gated norm: epilogue.cuh
    static_assert(kForm == Form::kWhole || !kNorms, "one CTA has all of a head's channels");
    static_assert(!kParts || !kConvolves);
    static constexpr bool kCluster = kForm != Form::kWhole;
    // A pair by itself, of the usual inputs: it has a tuning of its own that others were not measured with
    // (docs/kernels-cuda.md, The pair).
    static constexpr bool kPlainPair = kForm == Form::kPair && kBounded && !kGateFloat && !kParts && !kConvolves;
    static constexpr int kWarpgroups = kForm == Form::kPair ? 1 : 2;  // consumers, 64 state rows each
    static constexpr int kGroups = 4;                                // producers, two warps each
    static constexpr int kConsumers = kWarpgroups * 128;
    // Parts that may be shared by time instead of V have the threads of either way: in a pair, four warps idle.
    static constexpr int kIdle = kForm == Form::kPair && kParts ? 128 : 0;
    static constexpr int kFirstProducer = kConsumers + kIdle;
    static constexpr int kThreads = kFirstProducer + kGroups * 64;
    // Registers a thread, moved between the roles at the start.
    static constexpr int kConsumerRegisters = kForm == Form::kPair ? (kPlainPair ? 232 : 192) : 160;
    static constexpr int kProducerRegisters = kForm != Form::kPair ? 96 : kParts ? 128 : 112;
    // setmaxnreg acts on whole warpgroups and hangs where the roles want more than the launch took: as many registers a
    // thread as fit an SM, which the assembler counts in fours of warps.
    static constexpr int kLaunchRegisters = 65536 / (32 * ((kThreads / 32 + 3) / 4 * 4)) / 8 * 8;
    static constexpr int kIdleRegisters = 24;
    static_assert(kGroups % 2 == 0 && kConsumers * kConsumerRegisters + kIdle * kIdleRegisters +
                                              (kThreads - kFirstProducer) * kProducerRegisters <=
                                          kThreads * kLaunchRegisters);
    // A CTA may run ahead of its peer by one round of its groups, so a cluster needs twice as many stages as groups. In
    // either, the CTA of rank `stage & 1` fills a stage.
    static constexpr int kStages = kCluster ? 8 : 4;
    // Behind V: low parts of the update's keys in chunks with strong writes, [4 x 4 n-tiles][lane][n-tile][tokens 2q,
    // 2q + 1, 8 + 2q, 9 + 2q], the upper bytes of fp16 words 2^11 times as large. Transitions have no room for them, nor
    // has a pair that convolves.
    static constexpr bool kLowKeys = kForm == Form::kWhole || (kForm == Form::kPair && !kConvolves);
    static constexpr int low_keys = Stage::v + (kForm == Form::kPair ? 2048 : 4096);
    static constexpr int kLowKeyBytes = kLowKeys ? 2048 : 0;
    static constexpr int kStageBytes = low_keys + kLowKeyBytes;

    static constexpr int kGateTile = kGateFloat ? 8192 : 4096;
    static constexpr int raw_v = 8192 + kGateTile;       // within a slot, where the kernel convolves
    static constexpr int raw_before = raw_v + 4096;      // [q, k, v][2 halves][3 rows before the chunk][128 B]
    static constexpr int kRawBytes = kConvolves ? raw_before + 3 * 768 : raw_v;  // q, k, g of one chunk
    static constexpr int kRaw = (kRawBytes + 1023) / 1024 * 1024;
    static constexpr int kScratch = 1552;                // of a producer group, see solve.cuh
    // Of a consumer warp, its 16 x 16 output tile: in a cluster, in what the stage of its number leaves free.
    static constexpr int kStaging = kNorms ? 0 : 512;
    static_assert(!kCluster || (kStages >= kWarpgroups * 4 && Stage::prepared + kStaging <= Stage::v));
    // Raw tiles in flight.
    static constexpr int kSlots = kCluster ? kGroups : kGateFloat && (kConvolves || kNorms) ? 5 : 6;
    // Their barriers. Where slots pass from group to group, the tiles of another group's chunk, the slot's use before, may
    // still be on their way, and a wait by parity would take the use before that one for its own. So two barriers take
    // turns: the use before of either is of a chunk that the consumers are done with.
    static constexpr int kRawBarriers = kSlots % kGroups ? 2 * kSlots : kSlots;
    DEVICE static int slot_of(int raw_barrier) { return raw_barrier < kSlots ? raw_barrier : raw_barrier - kSlots; }
    DEVICE static int next_of(int raw_barrier) {  // the one of the slot's next use
        return raw_barrier < kSlots ? raw_barrier + kRawBarriers - kSlots : raw_barrier - kSlots;
    }

    // With one slot a group, the next raw tiles are asked for as soon as these are read; then inverse-decayed keys may
    // not lie over g. fp32 g, or what a convolution reads, leaves no room.
    static constexpr bool kEarlyReload = kCluster && !kGateFloat && !kConvolves;
    // Sums of decays in shared memory (decays.cuh), where inverse-decayed keys have a tile of their own. Less code than
    // that of unbounded gates does not pay for it: bounded ones lose 5 %. Nor does the whole form, which loses 4 %.
    static constexpr bool kDecaysInShared = kEarlyReload && !kBounded;
    // Sums in registers, but made and taken by loops of two turns, half of the code. The whole form loses 4 %.
    static constexpr bool kDecaysInTurns = kPlainPair;

    static constexpr int stages = 0;
    static constexpr int raw = stages + kStages * kStageBytes;
    static constexpr int z = raw + kSlots * kRaw;  // of the chunk whose output waits in a group's stage
    static constexpr int inverse = z + (kNorms ? kGroups * 4096 : 0);
    static constexpr int scratch = inverse + (kEarlyReload ? kGroups * 4096 : 0);
    static constexpr int staging = scratch + kGroups * kScratch;
    static constexpr int norm_weight = staging + (kCluster ? 0 : kWarpgroups * 4 * kStaging);  // fp32 [128]
    DEVICE static int staging_of(int warp) {
        return kCluster ? stages + warp * kStageBytes + Stage::prepared : staging + warp * kStaging;
    }
    static constexpr int full = norm_weight + (kNorms ? 512 : 0);            // barriers: stage ready
    static constexpr int empty = full + 8 * kStages;                   // stage free
    static constexpr int raw_full = empty + 8 * kStages;               // raw tiles landed
    static constexpr int z_full = raw_full + 8 * kRawBarriers;         // a group's z landed
    static constexpr int handovers = z_full + 8 * kGroups * kNorms;    // of builds for racecheck: barrier.cuh
    static constexpr int kBytes = handovers + 16 * kGroups * KDA_EVERY_LANE_ARRIVES + 1024;  // 1024: to align the base
    static_assert(kBytes <= 232448 - 1024, "shared memory of an SM, less what the driver and static variables take");
};
