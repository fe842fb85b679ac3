import torch
from torch import nn
from vllm.model_executor.layers.mamba.abstract import MambaBase


class GatedDeltaNetAttention(nn.Module, MambaBase):
    def __init__(self, config, vllm_config, prefix="") -> None:
        super().__init__()
        self.prefix = prefix
        self.num_spec = config.num_spec
        self.head_dim = config.head_dim
        self.local_num_heads = config.num_heads
        self.state_dtype = config.state_dtype
        self.original_calls: list[str] = []  # for the tests: what vLLM's own code was asked to do

    def get_state_dtype(self) -> tuple[torch.dtype, torch.dtype]:
        return torch.float32, self.state_dtype

    def own_step(self, metadata) -> None:
        """vLLM's own code ran: recorded; it is not part of the stand-in."""
        self.original_calls.append("without metadata" if metadata is None else "step")
