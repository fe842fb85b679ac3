from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention


class KimiK3DeltaAttention(GatedDeltaNetAttention):
    def __init__(self, config, vllm_config, prefix="") -> None:
        super().__init__(config, vllm_config, prefix)
