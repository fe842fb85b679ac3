from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase


class TritonKDAKernel(LinearAttnKernelBase):
    supports_track_state_snapshot = True

    def __init__(self):
        self.calls = []

    def extend(
        self,
        q,
        k,
        v,
        g,
        beta,
        *,
        ssm_states,
        cache_indices,
        query_start_loc,
        A_log=None,
        dt_bias=None,
        lower_bound=None,
        beta_is_raw=False,
        return_intermediate_states=False,
        **kwargs,
    ):
        self.calls.append({"return_intermediate_states": return_intermediate_states, **kwargs})
        return (v, None) if return_intermediate_states else v
