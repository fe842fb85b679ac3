"""The accuracy battery: what a backend does to a model's output, judged against the torch backend in float32.

    battery = Battery(Models(load), FULL)
    report = battery.run([reference(), of_backend("triton", "operator", device, "bounded")])

`rapidkda eval` is its command; docs/evaluation.md says what is compared and why.
"""

from .battery import FULL, QUICK, Battery, Judged, Models, Report, Sizes
from .candidates import Candidate, by_instrument, of_backend, reference, runnable
from .logprobs import Spans

__all__ = [
    "FULL",
    "QUICK",
    "Battery",
    "Candidate",
    "Judged",
    "Models",
    "Report",
    "Sizes",
    "Spans",
    "by_instrument",
    "of_backend",
    "reference",
    "runnable",
]
