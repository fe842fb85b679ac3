"""The suite has teeth: each known fault, put into the torch backend, makes a case fail."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from rapidkda.backends.torch import TorchBackend

from . import test_contract  # noqa: F401  registers the checks
from .cases import matching
from .faults import FAULTS, as_method, textbook
from .target import Target, find


@pytest.fixture(scope="module")
def torch_target() -> Target:
    found = find("torch")
    if not isinstance(found, Target):
        raise RuntimeError(f"the torch backend must run everywhere: {found}")
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(torch_target: Target, name: str) -> None:
    """Each prefix in `caught_by` names cases of which at least one must fail."""
    fault = FAULTS[name]
    with fault.install():
        for prefix in fault.caught_by:
            if not any(failure(case.run, torch_target) for case in matching(prefix)):
                pytest.fail(f"no case of {prefix} notices the fault {name!r}")


def failure(run, target: Target) -> str | None:  # type: ignore[no-untyped-def]
    """Why the check fails, or None if it passes. Any other exception than the check's own is a mistake here."""
    try:
        run(target)
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", ["B01", "B02", "B04", "B08", "B16", "B20", "regimes"])
def test_textbook_form_without_a_fault_passes(torch_target: Target, kind: str) -> None:
    """What replaces the backend's prefill in the numerical faults is right until a switch is set."""

    def right(original, call):  # type: ignore[no-untyped-def]
        if call.checkpoints is None:
            textbook.prefill(call, textbook.Switches())
        else:
            original(call)

    with patch.object(TorchBackend, "prefill", as_method("prefill", right)):
        for case in matching(kind):
            case.run(torch_target)


def test_catalogue_is_large_enough() -> None:
    assert len(FAULTS) >= 15
