class LinearAttnKernelBase:
    uses_state_checkpoints = False
    supports_fused_chain_verify = False
    supports_strided_target_verify_qkv = False
    supports_track_state_snapshot = False
