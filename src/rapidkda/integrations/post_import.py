"""Run a function right after a module has been imported.

vLLM and SGLang load their plugins in every process, before they know the model; importing layer modules there would
cost every user time and memory, and may initialise CUDA in a process that is about to fork. So their classes are
prepared when they import them themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Action = Callable[[ModuleType], None]


class PostImport(MetaPathFinder):
    """A finder that leaves finding to the standard one and runs an action after the module's own code."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.actions:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for action in self.actions.pop(fullname, []):
                action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = PostImport()


def after_import(name: str, action: Action) -> None:
    """Run `action` on the module now if it is imported, else once, right after its import."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    _finder.actions.setdefault(name, []).append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget() -> None:
    """Drop all actions that have not run."""
    _finder.actions.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
