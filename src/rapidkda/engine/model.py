"""The model on packed tokens: one forward pass over the tokens of a whole step, whatever mix of requests they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..problem import Rollback
from ..serving import BackendWish, KDALayer, StatePool, StateShape, StepBatch, Workspace
from .cache import AttentionCache
from .families import KDA, family_of
from .weights import adopt

# All that torch has but cuDNN, its first choice on Hopper: that one builds a plan, some 30 ms of the host, for each
# number of cached tokens that it has not seen, and every step of a request has another one.
ATTENTION_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """One request's tokens on the token axis, and what its attention layers keep."""

    first: int
    length: int
    cache: AttentionCache


class PackedModel:
    """A transformers model whose KDA layers are `KDALayer`s and whose other layers run as they are.

    Args:
        model: `Glm5NextForConditionalGeneration` (text only) or `KimiLinearForCausalLM`, in evaluation mode. Its KDA
            parameters become views of the layers' (see `rapidkda.engine.weights`); values and classes stay.
        state_dtype: of the recurrent states.
        backends: which backends the configuration asks for.
        one_by_one: call the model's modules with one token at a time, so that shapes do not depend on the step.

    Raises ValueError or TypeError for a model that the engine does not run, `BackendUnavailable` for a backend asked
    for by name that cannot run here.
    """

    def __init__(
        self,
        model: Any,
        *,
        state_dtype: torch.dtype = torch.float32,
        backends: BackendWish | None = None,
        one_by_one: bool = False,
    ):
        self.family = family_of(model)
        _check_place(model)
        self.one_by_one = one_by_one
        config = self.family.config
        layers = list(self.family.text.layers)[: config.num_hidden_layers]
        places = [index for index, kind in enumerate(config.layer_types) if kind == KDA]
        if not places:
            raise ValueError("model must have KDA layers, got none")
        self.layers = layers
        self.kda: dict[int, KDALayer] = {
            index: adopt(
                layers[index].self_attn,
                config,
                place,
                state_dtype=state_dtype,
                backends=backends or BackendWish(),
            )
            for place, index in enumerate(places)
        }
        self.attention = tuple(index for index in range(len(layers)) if index not in self.kda)
        first = self.first_layer
        self.device = first.in_proj.device
        self.dtype = first.in_proj.dtype
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size

    @property
    def first_layer(self) -> KDALayer:
        """Any KDA layer: they are alike in all but weights."""
        return next(iter(self.kda.values()))

    def state_shape(self, max_drafts: int, rollback: Rollback, record_rows: int | None = None) -> StateShape:
        """Of the pool that the KDA layers need."""
        return self.first_layer.state_shape(max_drafts, rollback, record_rows=record_rows)

    def new_cache(self) -> AttentionCache:
        """For one request."""
        return AttentionCache(self.attention)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [T, D] of token ids [T]."""
        embedded: Tensor = self.family.text.embed_tokens(ids)
        return embedded

    def forward(
        self, ids: Tensor, spans: Sequence[Span], batch: StepBatch, pool: StatePool, workspace: Workspace
    ) -> Tensor:
        """Run a step.

        Args:
            ids: int64 [T], T = batch.num_tokens, all of them requests' tokens.
            spans: the requests, in the order of their tokens; their caches grow.
            batch: the same step's tables, filled over `pool`.
            pool: states, updated in place.
            workspace: scratch of the KDA layers.

        Returns:
            Hidden states [T, D] after the last norm.
        """
        family = self.family
        pieces = [family.embed(piece) for piece in self._pieces(ids[None])]
        topk: list[Any] = [None] * len(spans)
        for index, layer in enumerate(self.layers):
            entered = [family.enter(layer, piece) for piece in pieces]
            x = _join([x for x, _ in entered])
            if index in self.kda:
                y = self.kda[index](x[0], batch, pool, workspace)[None]
                topk = [None] * len(spans)
            else:
                with sdpa_kernel(ATTENTION_KERNELS):
                    parts = [self._attend(layer.self_attn, x, span, topk[place]) for place, span in enumerate(spans)]
                y = _join([part for part, _ in parts])
                topk = [chosen for _, chosen in parts]
            pieces = [family.leave(layer, carry, part) for (_, carry), part in zip(entered, self._pieces(y))]
        return _join([family.finish(piece) for piece in pieces])[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocabulary] of hidden states [R, D]."""
        return _join([self.family.head(piece) for piece in self._pieces(hidden[None])])[0]

    def _pieces(self, x: Tensor) -> list[Tensor]:
        """[1, T, ...] as it is, or one copy a token."""
        return [piece.clone() for piece in x.split(1, dim=1)] if self.one_by_one else [x]

    def _attend(self, module: Any, x: Tensor, span: Span, topk: Any) -> tuple[Tensor, Any]:
        own = x[:, span.first : span.first + span.length]
        if not self.one_by_one:
            return self.family.attend(module, own, span.cache, topk)
        parts = [
            self.family.attend(module, token, span.cache, None if topk is None else topk[place])
            for place, token in enumerate(self._pieces(own))
        ]
        return _join([part for part, _ in parts]), [chosen for _, chosen in parts]


def _check_place(model: nn.Module) -> None:
    """All weights are on one real device, and nothing drops out."""
    if model.training:
        raise ValueError("model must be in evaluation mode (call model.eval()), got a model in training mode")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise ValueError(f"model must have all of its weights on one device, got {', '.join(devices)}")


def _join(pieces: Sequence[Tensor]) -> Tensor:
    """Pieces of the token axis, dimension 1, side by side."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=1)
