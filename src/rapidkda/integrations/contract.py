"""What the plugin relies on in another package's sources, as data, and whether the sources at hand agree.

The sources are parsed, never imported: a check costs milliseconds, needs neither a GPU nor the package's dependencies,
and runs the same on an installed package and on an unpacked wheel.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

FunctionNode = (ast.FunctionDef, ast.AsyncFunctionDef)
Definition = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Sources:
    """The Python files of a package under `root`, the folder that contains the package's own folder."""

    root: Path
    _modules: dict[str, tuple[ast.Module, str] | None] = field(default_factory=dict, repr=False)

    def module(self, name: str) -> tuple[ast.Module, str] | None:
        """Syntax tree and text of a module, or None when there is no such file."""
        if name not in self._modules:
            base = self.root.joinpath(*name.split("."))
            for path in (base.with_suffix(".py"), base / "__init__.py"):
                if path.is_file():
                    text = path.read_text(encoding="utf-8")
                    self._modules[name] = (ast.parse(text), text)
                    break
            else:
                self._modules[name] = None
        return self._modules[name]

    def find(self, module: str, qualified_name: str) -> ast.AST | None:
        """The class, function or method, e.g. "Layer.forward"; None when it is not there."""
        parsed = self.module(module)
        node: ast.AST | None = parsed[0] if parsed else None
        for part in qualified_name.split("."):
            node = next(
                (child for child in _statements(node) if isinstance(child, Definition) and child.name == part),
                None,
            )
        return node


class Fact(Protocol):
    """One thing relied on."""

    def difference(self, sources: Sources) -> str | None:
        """None if the sources agree, else what was expected and what was found."""
        ...


@dataclass(frozen=True)
class Parameters:
    """A function takes exactly these parameters, in this order (`self` left out)."""

    module: str
    name: str
    parameters: tuple[str, ...]

    def difference(self, sources: Sources) -> str | None:
        node = sources.find(self.module, self.name)
        where = f"{self.module}.{self.name}"
        if not isinstance(node, FunctionNode):
            return f"{where}: expected a function of ({', '.join(self.parameters)}), found none"
        found = parameter_names(node)
        if found != self.parameters:
            return f"{where}: expected parameters ({', '.join(self.parameters)}), found ({', '.join(found)})"
        return None


@dataclass(frozen=True)
class Accepts:
    """A function can be called with these keywords, and takes no other without a default beyond `first`."""

    module: str
    name: str
    first: tuple[str, ...]  # leading parameters passed by position
    keywords: tuple[str, ...]

    def difference(self, sources: Sources) -> str | None:
        node = sources.find(self.module, self.name)
        where = f"{self.module}.{self.name}"
        if not isinstance(node, FunctionNode):
            return f"{where}: expected a function, found none"
        found = parameter_names(node)
        if found[: len(self.first)] != self.first:
            return f"{where}: expected first parameters {self.first}, found {found[: len(self.first)]}"
        missing = [name for name in self.keywords if name not in found]
        if missing:
            return f"{where}: expected parameters {', '.join(missing)}, found ({', '.join(found)})"
        needed = [name for name in required_names(node) if name not in (*self.first, *self.keywords)]
        if needed:
            return f"{where}: expected no required parameters beyond the ones given, found {', '.join(needed)}"
        return None


@dataclass(frozen=True)
class Members:
    """A class, or one of the bases listed, has these attributes: methods, class-level names, or `self.x = ...`."""

    module: str
    cls: str
    names: tuple[str, ...]
    bases: tuple[tuple[str, str], ...] = ()

    def difference(self, sources: Sources) -> str | None:
        found: set[str] = set()
        for module, cls in ((self.module, self.cls), *self.bases):
            node = sources.find(module, cls)
            if not isinstance(node, ast.ClassDef):
                return f"{module}.{cls}: expected a class, found none"
            found |= member_names(node)
        missing = [name for name in self.names if name not in found]
        if missing:
            return f"{self.module}.{self.cls}: expected attributes {', '.join(missing)}, found none of these names"
        return None


@dataclass(frozen=True)
class Derives:
    """A class names this base class."""

    module: str
    cls: str
    base: str

    def difference(self, sources: Sources) -> str | None:
        node = sources.find(self.module, self.cls)
        if not isinstance(node, ast.ClassDef):
            return f"{self.module}.{self.cls}: expected a class, found none"
        found = [ast.unparse(base) for base in node.bases]
        if self.base not in found:
            return f"{self.module}.{self.cls}: expected base class {self.base}, found {', '.join(found) or 'none'}"
        return None


@dataclass(frozen=True)
class Imports:
    """A module binds these names at its top level: definitions, assignments or imports."""

    module: str
    names: tuple[str, ...]

    def difference(self, sources: Sources) -> str | None:
        parsed = sources.module(self.module)
        if parsed is None:
            return f"{self.module}: expected a module, found none"
        found = bound_names(_statements(parsed[0]))
        missing = [name for name in self.names if name not in found]
        if missing:
            return f"{self.module}: expected names {', '.join(missing)}, found none of these names"
        return None


@dataclass(frozen=True)
class Constant:
    """A module assigns this literal to a name."""

    module: str
    name: str
    value: object

    def difference(self, sources: Sources) -> str | None:
        parsed = sources.module(self.module)
        where = f"{self.module}.{self.name}"
        for node in parsed[0].body if parsed else ():
            if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [self.name]:
                found = ast.unparse(node.value)
                return None if found == repr(self.value) else f"{where}: expected {self.value!r}, found {found}"
        return f"{where}: expected {self.value!r}, found none"


@dataclass(frozen=True)
class Text:
    """A class or function reads exactly as it did when the plugin was checked against it.

    Names and signatures cannot tell whether a value changed its meaning (logits or probabilities, which rows, which
    layout), so the code whose meaning matters is pinned. Comments and white space are left out.
    """

    module: str
    name: str
    digest: str

    def difference(self, sources: Sources) -> str | None:
        found = text_digest(sources, self.module, self.name)
        if found == self.digest:
            return None
        return f"{self.module}.{self.name}: expected source text {self.digest}, found {found or 'none'}"


def differences(facts: Iterable[Fact], sources: Sources) -> list[str]:
    """Every disagreement."""
    return [found for fact in facts if (found := fact.difference(sources)) is not None]


def text_digest(sources: Sources, module: str, name: str) -> str | None:
    """16 hex digits of a definition's text without comments and white space, the same in every Python version."""
    node = sources.find(module, name)
    parsed = sources.module(module)
    if parsed is None or not isinstance(node, Definition):
        return None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = parsed[1].splitlines(keepends=True)[first - 1 : node.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip())
    text = "".join(line[indent:] if line[:indent].isspace() else line for line in lines)
    kept = text.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            kept[row - 1] = kept[row - 1][:column]
    return hashlib.sha256("".join("".join(kept).split()).encode()).hexdigest()[:16]


def parameter_names(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """Parameter names in order, without `self` and `cls`; `*args` and `**kwargs` keep their stars."""
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        names.append("*" + arguments.vararg.arg)
    names += [a.arg for a in arguments.kwonlyargs]
    if arguments.kwarg:
        names.append("**" + arguments.kwarg.arg)
    return tuple(names[1:] if names and names[0] in ("self", "cls") else names)


def required_names(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Parameters without a default."""
    arguments = node.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default]
    return [name for name in required if name not in ("self", "cls")]


def member_names(node: ast.ClassDef) -> set[str]:
    """Methods, class-level names and every `self.x` that a method assigns."""
    names = bound_names(node.body)
    for child in ast.walk(node):
        if (
            isinstance(child, ast.Attribute)
            and isinstance(child.ctx, ast.Store)
            and isinstance(child.value, ast.Name)
            and child.value.id == "self"
        ):
            names.add(child.attr)
    return names


def bound_names(statements: Iterable[ast.AST]) -> set[str]:
    """Names that statements bind in their own scope."""
    names: set[str] = set()
    for node in statements:
        if isinstance(node, Definition):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def _statements(node: ast.AST | None) -> list[ast.AST]:
    """A scope's statements, those inside `if` and `try` included."""
    result: list[ast.AST] = []
    queue: list[ast.AST] = list(getattr(node, "body", ()))
    while queue:
        child = queue.pop(0)
        result.append(child)
        if isinstance(child, (ast.If, ast.Try)):
            queue += [*child.body, *child.orelse, *getattr(child, "finalbody", ())]
            queue += [statement for handler in getattr(child, "handlers", ()) for statement in handler.body]
    return result
