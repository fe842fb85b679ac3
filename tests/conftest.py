"""Options and fixtures of the whole test suite."""

from __future__ import annotations

import os

import pytest
import torch

from rapidkda import dispatch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", type=_shard, help="I/N: of the tests that are selected, every N-th from the I-th on")
    parser.addoption("--backend", action="append", choices=sorted(dispatch.REGISTRY), help="contract suite: only these")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _shard(text: str) -> slice:
    index, count = map(int, text.split("/"))
    return slice(index, None, count)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard = config.getoption("--shard")
    if shard is not None:
        items[:] = items[shard]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
