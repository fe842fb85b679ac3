"""`rapidkda verify`: passes on a right backend, fails on a wrong one, refuses to pass on nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest

from rapidkda import Segments, dispatch
from rapidkda.backends.cuda.host.plan import FormName, plan_prefill
from rapidkda.backends.torch import TorchBackend
from rapidkda.backends.triton import plan as triton_plan
from rapidkda.ops import kinds
from rapidkda.problem import ConvCall, DecodeCall, NormCall, PrefillCall, VerifyCall
from rapidkda.testing import LARGE, SMALL

from .conftest import Cli


def test_torch_backend_passes(cli: Cli) -> None:
    done = cli(
        "verify", "--backend", "torch", "--device", "cpu", "--quick", "--regime", "slow", "--regime", "unbounded"
    )
    assert done.code == 0, done.out
    for operator in ("prefill", "decode", "verify/slots", "verify/replay", "verify/deferred", "conv", "norm"):
        assert operator in done.out
    assert "0 not;" in done.out
    assert "MISS" not in done.out


class Wrong(TorchBackend):
    """Right but for one operator, whose outputs are off by one part in a hundred."""

    def __init__(self, operator: str):
        self.operator = operator

    def prefill(self, call: PrefillCall) -> None:
        super().prefill(call)
        self._spoil("prefill", call)

    def decode(self, call: DecodeCall) -> None:
        super().decode(call)
        self._spoil("decode", call)

    def verify(self, call: VerifyCall) -> None:
        super().verify(call)
        self._spoil("verify", call)

    def conv(self, call: ConvCall) -> None:
        super().conv(call)
        self._spoil("conv", call)

    def norm(self, call: NormCall) -> None:
        super().norm(call)
        self._spoil("norm", call)

    def _spoil(self, operator: str, call: PrefillCall | DecodeCall | VerifyCall | ConvCall | NormCall) -> None:
        if operator == self.operator:
            call.out.mul_(1.01)


@pytest.fixture
def _new_kinds() -> Iterator[None]:
    """What was decided for the right backend does not hold for a wrong one of its name, nor the other way round."""
    kinds.forget()
    yield
    kinds.forget()


@pytest.mark.usefixtures("_new_kinds")
@pytest.mark.parametrize("operator", ["prefill", "decode", "verify", "conv", "norm"])
def test_wrong_backend_is_caught(cli: Cli, monkeypatch: pytest.MonkeyPatch, operator: str) -> None:
    wrong = Wrong(operator)
    real = dispatch.load
    monkeypatch.setattr(dispatch, "load", lambda name: wrong if name == "torch" else real(name))
    done = cli("verify", "--backend", "torch", "--device", "cpu", "--shape", "chunk_and_tail", "--regime", "slow")
    assert done.code == 1
    assert "MISS" in done.out
    missed = [line.split()[1].split("/")[0] for line in done.out.splitlines() if "MISS" in line]
    assert set(missed) == {operator}


def test_every_form_of_the_kernels_is_reached() -> None:
    """On an H200: by plans alone, so that no form is left out where nobody sees it."""
    forms, cut = set(), set()
    for shape in (*SMALL, *LARGE):
        chunks = [-(-length // 16) for length in shape.seq_lens]
        forms.add(plan_prefill(len(chunks), sum(chunks), max(chunks), shape.hv, 132).form)
        segments = Segments.from_lengths(shape.seq_lens)
        cut.add(triton_plan.cut(segments, shape.tokens, shape.hv, (4, 4), 132, triton_plan.SM90) != triton_plan.NO_CUT)
    assert forms == set(get_args(FormName))
    assert cut == {True, False}


def test_details_has_a_row_a_check(cli: Cli) -> None:
    arguments = ("verify", "--backend", "torch", "--device", "cpu", "--regime", "slow", "--shape", "one_token")
    done = cli(*arguments, "--shape", "one_chunk", "--details")
    assert done.code == 0
    assert done.out.count("one_token") == done.out.count("one_chunk") == done.out.count(" ok") // 2
