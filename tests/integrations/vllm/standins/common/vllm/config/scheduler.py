from dataclasses import dataclass


@dataclass
class SchedulerConfig:
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 8
