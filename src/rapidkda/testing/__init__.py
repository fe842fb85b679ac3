"""Workloads, gate regimes, inputs, accuracy bars: one set, shared by tests, `rapidkda verify` and `rapidkda bench`."""

from .inputs import Inputs, activated, make_inputs
from .regimes import REGIMES, Regime, regime
from .shapes import DECODE_BATCHES, LARGE, PREFILL, SMALL, VERIFY_DRAFTS, Shape, by_name, decode_shape
from .tolerances import Bar, bar, carried_bar, case_bar, relative_error, worst_output_error, worst_state_error

__all__ = [
    "DECODE_BATCHES",
    "LARGE",
    "PREFILL",
    "REGIMES",
    "SMALL",
    "VERIFY_DRAFTS",
    "Bar",
    "Inputs",
    "Regime",
    "Shape",
    "activated",
    "bar",
    "by_name",
    "carried_bar",
    "case_bar",
    "decode_shape",
    "make_inputs",
    "regime",
    "relative_error",
    "worst_output_error",
    "worst_state_error",
]
