"""A multi-token prediction head as a drafter.

The head reads, for position i, the model's hidden state of token i and the embedding of token i + 1, and predicts token
i + 2:

    x = eh_proj(concat(enorm(embedding), hnorm(hidden)));  x = x + KDA(input_layernorm(x));  x = x + MLP(...);  norm(x)

and the model's own output head follows. Its KDA layer has a state of its own for every request, which only moves over
settled tokens. To look further ahead the head goes on from its own output in the place of the model's hidden state, in
a second slot that starts from the first and is thrown away.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..serving import BackendWish, KDALayer, StatePool, StepBatch, StepLimits, StepRequest, Workspace
from ..serving.weights import Source
from .config import EngineConfig
from .drafts import Progress
from .model import PackedModel
from .request import Request

PREFIX = "mtp."
ATTENTION = "self_attn."


class MtpHead(nn.Module):
    """The head's weights and its arithmetic on packed tokens.

    Args:
        hidden_size: of the model.
        num_heads, head_dim, conv_width, lower_bound: of its KDA layer.
        intermediate_size: of its SwiGLU feed-forward.
        eps: of its norms.
        dtype, state_dtype, backends, device: as in `KDALayer`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        intermediate_size: int,
        *,
        conv_width: int = 4,
        lower_bound: float | None = -5.0,
        eps: float = 1e-5,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        backends: BackendWish | None = None,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        checks.integer("intermediate_size", intermediate_size, 1)
        self.eps = eps
        self.self_attn = KDALayer(
            hidden_size,
            num_heads,
            head_dim,
            conv_width=conv_width,
            lower_bound=lower_bound,
            eps=eps,
            dtype=dtype,
            state_dtype=state_dtype,
            checkpoints=False,
            backends=backends,
            device=device,
        )
        self.weights = nn.ParameterDict(
            {
                name.replace(".", "_"): nn.Parameter(torch.zeros(extents, dtype=dtype, device=device), False)
                for name, extents in _extents(hidden_size, intermediate_size).items()
            }
        )

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> MtpHead:
        """Dimensions of a Glm5NextTextConfig or KimiLinearConfig; `options` are those of the constructor."""
        return cls(
            config.hidden_size,
            config.linear_num_heads,
            config.linear_head_dim,
            config.intermediate_size,
            conv_width=config.linear_conv_kernel_dim,
            lower_bound=getattr(config, "linear_lower_bound", None),
            eps=config.rms_norm_eps,
            **options,
        )

    @torch.no_grad()
    def load_weights(self, source: Mapping[str, Tensor] | str | Path, prefix: str = PREFIX) -> None:
        """Load from a mapping, a safetensors file or a folder of them.

        Names below the prefix: `enorm.weight`, `hnorm.weight`, `input_layernorm.weight`,
        `post_attention_layernorm.weight`, `norm.weight` [D]; `eh_proj.weight` [D, 2 D]; `mlp.gate_proj.weight`,
        `mlp.up_proj.weight` [I, D]; `mlp.down_proj.weight` [D, I]; and `self_attn.` with Hugging Face's names of a KDA
        layer. Raises ValueError that names the tensor: unknown, missing, or of another shape; then nothing was written.
        """
        with Source(source) as tensors:
            own = {name.removeprefix(prefix): name for name in tensors.names(prefix)}
            own = {short: name for short, name in own.items() if not short.startswith(ATTENTION)}
            expected = _extents(self.self_attn.hidden_size, self.weights["mlp_gate_proj_weight"].shape[0])
            if own.keys() != expected.keys():
                missing, unknown = sorted(expected.keys() - own.keys()), sorted(own.keys() - expected.keys())
                raise ValueError(f"weights must be those of an MTP head below {prefix!r}: {missing=}, {unknown=}")
            values = {short: tensors.read(name) for short, name in own.items()}
        for short, value in values.items():
            checks.shape(own[short], value, expected[short], "of an MTP head")
        self.self_attn.load_weights(source, prefix + ATTENTION)
        for short, value in values.items():
            self.weights[short.replace(".", "_")].copy_(value)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, batch: StepBatch, pool: StatePool, workspace: Workspace
    ) -> Tensor:
        """Run a step: [T, D] embeddings of the following tokens, [T, D] hidden states, to [T, D] for the head."""
        joined = torch.cat([self._norm(embeddings, "enorm"), self._norm(hidden, "hnorm")], dim=-1)
        x = self._linear(joined, "eh_proj")
        x = x + self.self_attn(self._norm(x, "input_layernorm"), batch, pool, workspace)
        y = self._norm(x, "post_attention_layernorm")
        y = F.silu(self._linear(y, "mlp_gate_proj")) * self._linear(y, "mlp_up_proj")
        return self._norm(x + self._linear(y, "mlp_down_proj"), "norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}_weight"]
        return F.rms_norm(x.float(), x.shape[-1:], weight.float(), self.eps).to(x.dtype)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}_weight"])


def _extents(hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors beside the KDA layer's, by name in files."""
    norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "norm")
    return {
        **{f"{name}.weight": (hidden,) for name in norms},
        "eh_proj.weight": (hidden, 2 * hidden),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }


@dataclass(slots=True, eq=False)
class _Track:
    """One request in the head: its slots, and the head's output at the last settled token."""

    settled: tuple[int, ...]
    ahead: tuple[int, ...]
    hidden: Tensor  # [D]


class MtpDrafter:
    """Drafts from an MTP head, greedily.

    Args:
        head: of the model's hidden size, with its weights, on the model's device.
        model: whose embeddings and output head it shares.
        config: of the engine; sizes its pool, two slots a running request.
    """

    def __init__(self, head: MtpHead, model: PackedModel, config: EngineConfig):
        if head.self_attn.hidden_size != model.hidden_size:
            raise ValueError(f"head must have hidden_size {model.hidden_size}, got {head.self_attn.hidden_size}")
        if head.self_attn.in_proj.dtype != model.dtype:
            raise TypeError(f"head must be of {model.dtype} like the model, got {head.self_attn.in_proj.dtype}")
        self._head = head
        self._model = model
        shape = head.self_attn.state_shape()
        limits = StepLimits(config.max_num_batched_tokens, config.max_num_seqs, max_verifies=0, max_checkpoints=0)
        self._pool = StatePool(shape, 2 * config.max_num_seqs, device=model.device)
        self._batch = StepBatch(self._pool, limits)
        self._workspace = Workspace(
            shape, limits, head.self_attn.choices["prefill"], dtype=model.dtype, device=model.device
        )
        self._tracks: dict[Hashable, _Track] = {}

    @property
    def nbytes(self) -> int:
        """See `Drafter`."""
        return self._pool.nbytes + self._batch.nbytes + self._workspace.nbytes

    def observe(self, progress: Sequence[Progress]) -> None:
        """See `Drafter`: move the settled states on, all requests in one step."""
        records = [self._settle(one.request.request_id, len(one.following)) for one in progress]
        if not records:
            return
        following = [token for one in progress for token in one.following]
        out = self._run(records, following, torch.cat([one.hidden for one in progress]))
        end = 0
        for one in progress:
            end += len(one.following)
            self._tracks[one.request.request_id].hidden = out[end - 1]

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """See `Drafter`: one step of the head for each further draft, all requests at once."""
        drafts: dict[Hashable, list[int]] = {request.request_id: [] for request, _ in wanted}
        active = {
            request.request_id: self._tracks[request.request_id].hidden
            for request, count in wanted
            if count > 0 and request.request_id in self._tracks
        }
        most = {request.request_id: count for request, count in wanted}
        depth = 0
        while active:
            hidden = torch.stack(list(active.values()))
            for name, token in zip(active, self._model.logits(hidden).argmax(-1).tolist()):
                drafts[name].append(token)
            depth += 1
            left = {name: state for name, state in active.items() if most[name] > depth}
            if not left:
                break
            records = [self._look_ahead(name, first=depth == 1) for name in left]
            out = self._run(records, [drafts[name][-1] for name in left], torch.stack(list(left.values())))
            active = dict(zip(left, out))
        return [drafts[request.request_id] for request, _ in wanted]

    def forget(self, request_id: Hashable) -> None:
        """See `Drafter`."""
        if self._tracks.pop(request_id, None) is not None:
            self._pool.free(request_id)
            self._pool.free(("ahead", request_id))

    def _settle(self, name: Hashable, count: int) -> StepRequest:
        track = self._tracks.get(name)
        fresh = track is None
        if track is None:
            slots, ahead = self._pool.allocate(name), self._pool.allocate(("ahead", name))
            track = self._tracks[name] = _Track(slots, ahead, torch.empty(0))
        if fresh or count > 1:
            return StepRequest(name, "prefill", count, track.settled, has_initial_state=not fresh)
        return StepRequest(name, "decode", 1, track.settled)

    def _look_ahead(self, name: Hashable, first: bool) -> StepRequest:
        track = self._tracks[name]
        return StepRequest(("ahead", name), "decode", 1, track.ahead, read_slot=track.settled[0] if first else None)

    def _run(self, records: Sequence[StepRequest], tokens: Sequence[int], hidden: Tensor) -> Tensor:
        self._batch.fill(records)
        embeddings = self._model.embed(torch.tensor(tokens, device=self._model.device))
        out: Tensor = self._head(embeddings, hidden, self._batch, self._pool, self._workspace)
        return out
