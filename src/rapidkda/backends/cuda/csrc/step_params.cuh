// The one argument of verification and commit. Its host twin is host/step_params.py, which packs the same fields in this
// order.
#pragma once
#include "scalar.cuh"

enum StepFlags : u32 {
    kBetaFloat = 1u << 0,       // beta is fp32, else bf16
    kBetaLogits = 1u << 1,      // beta passes a sigmoid
    kL2Norm = 1u << 2,          // q and k are L2-normalised
    kGateFloat = 1u << 3,       // g is fp32, else bf16
    kBoundedGate = 1u << 4,     // g passes lower_bound * sigmoid; with neither, it is the log decay
    kSoftplusGate = 1u << 5,    // g passes -softplus
    kStateVFirst = 1u << 6,     // the pool is [S, HV, V, K], else [S, HV, K, V]
    kSlots64 = 1u << 7,         // int64 slots, else int32
    kAccepted64 = 1u << 8,      // int64 counts, else int32
    kVectorInputs = 1u << 9,    // four neighbouring channels of q, k and g may be read at once
    kVectorStates = 1u << 10,   // the pool is V-first and its rows start at multiples of 16 bytes
    kVectorRecords = 1u << 11,  // the same of records
};

struct StepParams {
    const u16* q;            // [T, H, K] bf16; null: a commit, which has no tokens
    const u16* k;
    const u16* v;            // [T, HV, V]
    const void* g;           // [T, HV, K]
    const void* beta;        // [T, HV]
    const float* A_log;      // [HV] or null: amplitude 1
    const float* dt_bias;    // [HV, K] or null: 0
    u16* out;                // [T, HV, V] bf16
    void* pool;
    float* records;          // [S, positions, HV, 2 K + V]: k | log decay | correction
    const int* first_token;  // [N]
    const int* length;       // [N]
    const void* slots;       // [N]
    const void* accepted;    // [N]
    int* held;               // [S, HV] or null: records of a head before those of the last step
    i64 q_token_stride, q_head_stride, k_token_stride, k_head_stride;  // all strides count elements
    i64 v_token_stride, v_head_stride, g_token_stride, g_head_stride;
    i64 beta_token_stride, beta_head_stride, out_token_stride, out_head_stride;
    i64 pool_stride, record_stride, record_position_stride;  // between slots; between slots, and positions
    i64 first_stride, length_stride, slot_stride, accepted_stride;
    int tokens, segments, value_heads, group;  // group: value heads a query head
    int pool_rows, pad_slot, positions;        // positions: rows of records a slot
    u32 flags;
    float scale, beta_scale, lower_bound;
    int reserved;
};

static_assert(sizeof(StepParams) == 320, "host/step_params.py packs this layout");
