"""Tests of the serving layer name their backend themselves."""

import pytest
import torch

from rapidkda import env


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (env.PREFILL_BACKEND, env.DECODE_BACKEND, "RAPIDKDA_CHECK"):
        monkeypatch.delenv(variable, raising=False)
    torch.set_num_threads(1)
