from dataclasses import dataclass

from torch import Tensor


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    num_computed_tokens: Tensor
    block_table_tensor: Tensor  # [requests, 1 + num_spec]
    num_actual_tokens: int
