"""`python -m rapidkda.integrations.vllm`: is the installed vLLM one that the plugin serves? Starts nothing.

Exit status: 0 when it is, 1 when it is not, or when there is none.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ... import env
from .plugin import UnsupportedVllm, find_seam
from .seams import SEAMS


def report() -> tuple[int, str]:
    """Exit status and text."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return 1, f"vLLM is not installed; rapidkda serves {', '.join(SEAMS)}"
    root = Path(spec.origin).parent.parent
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return 1, f"vLLM at {root} carries no version; rapidkda serves {', '.join(SEAMS)}"
    try:
        seam = find_seam(installed, root)
    except UnsupportedVllm as refusal:
        return 1, str(refusal)
    lines = [f"vLLM {installed} at {root}: all {len(seam.facts)} facts that rapidkda relies on hold"]
    lines += [f"  {layer.model}: {layer.module}.{layer.cls}" for layer in seam.layers]
    lines += [f"  not served: {refused.module}.{refused.cls}: {refused.reason}" for refused in seam.refused]
    lines.append(f"{env.VLLM_SWITCH} is {'prefill: on' if env.vllm_prefill() else 'not set: off unless configured'}")
    return 0, "\n".join(lines)


def main() -> int:
    status, text = report()
    sys.stdout.write(text + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
