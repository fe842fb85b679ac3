"""Wrong calls of every public operator: what each must raise, and that nothing is written.

Run by `test_bad_arguments`, and as a plain program (`python -O -m bad_arguments` in this folder's parent), so that no
check depends on assert statements: neither the library's nor a test runner's.
"""

from . import configuration, layer, neighbours, operands, sequences, steps  # noqa: F401  importing registers the calls
from .registry import CALLS, GOOD, BadCall, problem_with

__all__ = ["CALLS", "GOOD", "BadCall", "problem_with"]
