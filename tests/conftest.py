"""Options and fixtures of the whole test suite."""

from __future__ import annotations

import os

import pytest
import torch

from rapidkda import dispatch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", action="append", choices=sorted(dispatch.REGISTRY), help="contract suite: only these")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
