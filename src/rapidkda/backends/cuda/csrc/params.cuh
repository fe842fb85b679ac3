// The one argument of the prefill kernels. Its host twin is host/params.py, which packs the same fields in this order.
#pragma once
#include "copy.cuh"

constexpr int kOrderEntries = 64;  // segments whose launch order the host can choose

enum Flags : u32 {
    kBetaFloat = 1u << 0,          // beta is fp32, else bf16
    kBetaLogits = 1u << 1,         // beta passes a sigmoid
    kL2Norm = 1u << 2,             // q and k are L2-normalised
    kRawGate = 1u << 3,            // g passes its activation, else it is the log decay (unbounded kernels)
    kStateVFirst = 1u << 4,        // pools are [S, HV, V, K], else [S, HV, K, V]
    kInitialFloat = 1u << 5,       // dtype of `initial`: fp32, else bf16
    kFinalFloat = 1u << 6,         // dtype of `final`
    kCheckpointFloat = 1u << 7,    // dtype of `checkpoint_pool`
    kReadSlots64 = 1u << 8,        // int64 slots, else int32
    kWriteSlots64 = 1u << 9,
    kInitialFlag32 = 1u << 10,     // has_initial_state is int32, else one byte
    kOrdered = 1u << 11,           // `order` holds the launch order of the segments
    kVectorStates = 1u << 12,      // pools are V-first and aligned for two elements at a time
    kGateFloat = 1u << 13,         // g is fp32, else bf16; for kernels that are not compiled for one of them
    kScheduled = 1u << 14,         // `shares` says which CTA takes what
};

// Heads `head`... of a segment, one each for the CTAs (or clusters) `first`..., as many as `workers`; none: the end.
struct Share {
    u16 segment, head;
    u8 first, workers;
    u16 reserved;
};
constexpr int kShares = 96;

struct Params {
    TensorMap q, k, v, g;          // tiles of 16 tokens of one head
    const void* beta;              // [T, HV]
    const float* A_log;            // [HV] or null: amplitude 1
    const float* dt_bias;          // [HV, K] or null: 0
    u16* out;                      // [T, HV, V] bf16
    const void* initial;           // pool or null: every state starts at zero
    void* final_;                  // pool or null: last states are not kept
    void* checkpoint_pool;
    const int* first_token;        // [N]
    const int* length;             // [N]
    const void* read_slots;        // [N] or null: row n
    const void* write_slots;
    const void* has_initial;       // [N] or null: true
    const int* checkpoint_begin;   // [N+1] or null: none
    const int* checkpoint_offset;
    const int* checkpoint_slot;
    float* transitions;            // [N, P, HV] what parts leave, then [checkpoints, HV]: parts.cuh; or null
    u16* start_queries;            // [T, HV, K] bf16: with what outputs read the state that their part starts from
    int* seams;                    // [N, 2 P, HV], of the beginning of each half of a part: see seams.cuh
    i64 beta_token_stride, beta_head_stride;  // elements
    i64 out_token_stride, out_head_stride;
    i64 initial_stride, final_stride, checkpoint_stride;  // elements between slots
    i64 read_stride, write_stride, has_initial_stride;    // elements
    int tokens, segments, value_heads, group;  // group: value heads a query head
    int initial_rows, final_rows, checkpoint_rows, pad_slot;
    int parts;                     // P: of a segment, two CTAs each
    u32 flags;
    float scale, beta_scale, lower_bound;  // the scale of queries times 2^4: see Range
    int checkpoints;               // entries of checkpoint_offset and checkpoint_slot
    u16 order[kOrderEntries];
    Share shares[kShares];
};

static_assert(sizeof(Params) == 1728, "host/params.py packs this layout");
