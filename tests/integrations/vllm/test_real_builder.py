"""The tables of a step from the real metadata builders of each version, run alone out of their sources.

The builders are plain tensor code. What they import is replaced; how they split a step is theirs.
"""

from __future__ import annotations
import __future__

import ast
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rapidkda.integrations.contract import Sources
from rapidkda.integrations.vllm import metadata as steps
from rapidkda.integrations.vllm.seams import BuilderSeam, Seam

UTILS = "vllm.v1.attention.backends.utils"
NUM_SPEC = 3


class Common(SimpleNamespace):
    """Stands for vLLM's CommonAttentionMetadata."""

    def replace(self, **changes: Any) -> Common:
        return Common(**{**self.__dict__, **changes})

    def compute_num_computed_tokens(self) -> torch.Tensor:
        return self.seq_lens - self.query_start_loc.diff()


def function(sources: Sources, module: str, name: str, namespace: dict[str, Any]) -> Any:
    """One function of a module, compiled alone, its annotations not evaluated."""
    node = sources.find(module, name)
    assert isinstance(node, ast.FunctionDef)
    code = compile(
        ast.Module([node], []),
        f"{module}.{name}",
        "exec",
        flags=__future__.annotations.compiler_flag,
        dont_inherit=True,
    )
    exec(code, namespace)
    return namespace[node.name]


def builder(sources: Sources, seam: BuilderSeam, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`build` of a version's builder with the state that it reads, for a scheduler with NUM_SPEC drafts."""
    none = SimpleNamespace(build=lambda *args: None)
    namespace: dict[str, Any] = {
        "torch": torch,
        "MambaSpec": SimpleNamespace,
        "NULL_BLOCK_ID": 0,
        "GDNAttentionMetadata": SimpleNamespace,
        "KimiK3KDAMetadata": SimpleNamespace,
        "async_tensor_h2d": lambda data, device=None, dtype=None: torch.as_tensor(data, dtype=dtype),
        "mamba_get_block_table_tensor": lambda table, *args: table,
        "compute_causal_conv1d_metadata": lambda starts, device: ({}, None, None),
    }
    namespace["split_decodes_and_prefills"] = function(sources, UTILS, "split_decodes_and_prefills", {"torch": torch})
    build = function(sources, seam.module, f"{seam.cls}.build", namespace)
    for name, values in (
        ("utils", {"FLA_CHUNK_SIZE": 64}),
        ("index", {"prepare_chunk_indices": lambda s, n: s, "prepare_chunk_offsets": lambda s, n: s}),
    ):
        module = ModuleType(name)
        vars(module).update(values)
        for package in ("vllm.model_executor.layers.fla.ops", "vllm.third_party.flash_linear_attention.ops"):
            monkeypatch.setitem(sys.modules, f"{package}.{name}", module)
    state = SimpleNamespace(
        num_spec=NUM_SPEC,
        spec_state_slots=NUM_SPEC + 1,
        use_spec_decode=True,
        use_recoverssm=False,
        use_flashinfer_prefill=False,
        use_full_cuda_graph=False,
        gdn_prefill_backend="triton",
        plan_flashinfer_checkpoints=False,
        kv_cache_spec=SimpleNamespace(mamba_cache_mode="none"),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none")),
        checkpoint_builder=none,
        _build_chunk_metadata=lambda *args: (None, None),
        _stage_spec_decode=lambda *args: False,
        _stage_decode=lambda *args: False,
    )
    return lambda common, accepted, drafts: build(state, 0, common, accepted, drafts)


def random_step(generator: torch.Generator, speculative: bool) -> tuple[list[int], list[int], list[int]]:
    """Lengths, drafts (-1: not verified) and computed tokens of a step's requests, padding requests at the end."""

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    lengths, drafts, computed = [], [], []
    for _ in range(1 + draw(6)):
        verified = speculative and draw(2) == 1
        drafts.append(draw(NUM_SPEC + 1) if verified else -1)
        lengths.append(1 + drafts[-1] if verified else 1 + draw(40))
        computed.append(100 if verified else draw(2) * 64)
    lengths.append(2 + draw(30))  # at least one prefill
    drafts.append(-1)
    computed.append(0)
    if not speculative:  # vLLM puts decodes first then
        order = sorted(range(len(lengths)), key=lambda n: lengths[n] > 1)
        lengths, computed = [lengths[n] for n in order], [computed[n] for n in order]
    return lengths, drafts, computed


def test_tables_of_random_steps(seam: Seam, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources(root)
    for part in seam.builders:
        build = builder(sources, part, monkeypatch)
        for number in range(200):
            generator = torch.Generator().manual_seed(number)
            speculative = number % 2 == 1
            lengths, drafts, computed = random_step(generator, speculative)
            padding = number % 3 if speculative else 0
            count = len(lengths)
            starts = torch.tensor([0, *lengths, *[0] * padding]).cumsum(0).to(torch.int32)
            table = torch.randperm(200, generator=generator)[: count * (NUM_SPEC + 1)].view(count, -1) + 1
            table = torch.cat([table, torch.zeros(padding, NUM_SPEC + 1, dtype=table.dtype)]).to(torch.int32)
            context = torch.tensor([*computed, *[0] * padding], dtype=torch.int32)
            common = Common(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=context + starts.diff(),
                seq_lens_cpu_upper_bound=context + starts.diff(),
                block_table_tensor=table,
                num_reqs=count + padding,
                num_actual_tokens=int(starts[-1]),
                max_query_len=max(lengths),
                is_prefilling=torch.tensor(
                    [*(d < 0 and n > 1 for d, n in zip(drafts, lengths, strict=True)), *[False] * padding]
                ),
            )
            draft_counts = torch.tensor([*drafts, *[-1] * padding], dtype=torch.int32)
            accepted = torch.randint(1, NUM_SPEC + 2, (count + padding,), generator=generator, dtype=torch.int32)
            made = build(common, accepted, draft_counts if speculative else None)
            assert made.num_prefills > 0
            setattr(made, steps.HOST, steps.host_lengths(made, starts, draft_counts if speculative else None))
            assert getattr(made, steps.HOST) is not None

            verified = [n for n in range(count) if drafts[n] >= 0]
            if not made.num_spec_decodes and not any(drafts[n] > 0 for n in verified):
                verified = []  # until 0.31, a step in which nobody drafted anything is no speculative one
            others = [n for n in range(count) if n not in verified]
            tables = steps.tables(made)
            for segments, members in ((tables.prefill, others), (tables.verify, verified)):
                if segments is None:
                    assert members == []
                    continue
                real = [n for n in range(segments.count) if int(segments.length[n])]
                assert [int(segments.first_token[n]) for n in real] == [int(starts[m]) for m in members]
                assert [int(segments.length[n]) for n in real] == [lengths[m] for m in members]
                assert segments.host is not None
                assert segments.host[0].tolist() == segments.first_token.tolist()
                assert segments.host[1].tolist() == segments.length.tolist()
            rows = [n for n in range(tables.prefill.count) if int(tables.prefill.length[n])]
            assert made.non_spec_state_indices_tensor[rows].tolist() == table[others, 0].tolist()
            assert made.has_initial_state[rows].tolist() == [computed[m] > 0 for m in others]
            if tables.verify is not None:
                assert torch.equal(made.spec_state_indices_tensor[: tables.verify.count], table[verified])
                assert made.num_accepted_tokens[: tables.verify.count].tolist() == accepted[verified].tolist()
