from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel


class KDAKernelDispatcher:
    def __init__(self, decode_backend, prefill_backend, verify_backend):
        self.verify_backend = verify_backend
        self.prefill_backend = prefill_backend
        self.triton_kernel = TritonKDAKernel()
        self.decode_kernel = self.triton_kernel
        if prefill_backend.is_custom():
            raise ValueError(f"Unsupported KDA prefill backend: {prefill_backend}.")
        self.extend_kernel = self.triton_kernel

    def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **kwargs):
        return self.extend_kernel.extend(
            q,
            k,
            v,
            g,
            beta,
            ssm_states=ssm_states,
            cache_indices=cache_indices,
            query_start_loc=query_start_loc,
            **kwargs,
        )
