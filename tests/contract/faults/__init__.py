"""A catalogue of faults of kinds that shipped in real systems, each to be put into the torch backend."""

from . import arithmetic, deferred, serving, states  # noqa: F401  importing registers the faults
from .install import FAULTS, Fault, as_method

__all__ = ["FAULTS", "Fault", "as_method"]
