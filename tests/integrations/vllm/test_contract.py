"""The plugin's seams against the real sources of each supported vLLM version."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from rapidkda.integrations.contract import (
    Accepts,
    Constant,
    Derives,
    Imports,
    Members,
    Parameters,
    Sources,
    Text,
    differences,
)
from rapidkda.integrations.vllm import plugin
from rapidkda.integrations.vllm.seams import Seam


def test_real_sources_agree_with_every_fact(version: str, seam: Seam, root: Path) -> None:
    assert differences(seam.facts, Sources(root)) == []
    assert plugin.find_seam(version, root) is seam
    assert plugin.find_seam(version + "+cu130", root) is seam


def edited(root: Path, modules: set[str], old: str, new: str) -> Sources:
    """The sources with a word replaced in some modules."""
    sources, untouched = Sources(root), Sources(root)
    for module in modules:
        parsed = untouched.module(module)
        assert parsed is not None
        text = parsed[1].replace(old, new)
        sources._modules[module] = (ast.parse(text), text)
    return sources


def words(fact: object) -> list[str]:
    """Every word of a fact that the sources must contain."""
    if isinstance(fact, Parameters):
        return [fact.name.split(".")[-1], *(name.lstrip("*") for name in fact.parameters)]
    if isinstance(fact, Accepts):
        return [fact.name, *fact.first, *fact.keywords]
    if isinstance(fact, (Members, Imports)):
        return list(fact.names)
    if isinstance(fact, Derives):
        return [fact.base]
    if isinstance(fact, (Constant, Text)):
        return [fact.name.split(".")[-1]]
    raise AssertionError(f"no words known for {type(fact).__name__}")


_renamed: set[tuple[object, ...]] = set()  # (fact, texts of its modules): versions share most of both


def test_every_fact_notices_when_what_it_names_is_renamed(seam: Seam, root: Path) -> None:
    sources = Sources(root)
    for fact in seam.facts:
        holders = {fact.module, *(module for module, _ in getattr(fact, "bases", ()))}
        case = (fact, *((sources.module(holder) or (None, ""))[1] for holder in sorted(holders)))
        if case in _renamed:
            continue
        _renamed.add(case)
        for word in words(fact):
            found = fact.difference(edited(root, holders, word, "renamed_by_test"))
            assert found is not None, f"{fact} does not notice that {word} is gone"
            assert "expected" in found
            assert "found" in found


def test_text_fact_notices_an_edit_that_keeps_every_name(seam: Seam, root: Path) -> None:
    """A layer that starts to hand over other values under the same names is refused."""
    fact = next(f for f in seam.facts if isinstance(f, Text) and f.name.endswith("._forward"))
    assert fact.difference(edited(root, {fact.module}, "num_actual_tokens]", "num_actual_tokens + 1]")) is not None
    assert (
        fact.difference(edited(root, {fact.module}, "        has_initial", "        # a comment\n        has_initial"))
        is None
    )


def test_renamed_name_in_a_copy_is_refused_with_both_names(
    version: str, seam: Seam, root: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    layer = seam.layers[0]
    path = copy.joinpath(*layer.module.split(".")).with_suffix(".py")
    path.write_text(path.read_text().replace("core_attn_out", "attention_output"))
    with pytest.raises(plugin.UnsupportedVllm, match=r"expected parameters .*core_attn_out.*found .*attention_output"):
        plugin.find_seam(version, copy)


def test_unknown_version_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(plugin.UnsupportedVllm, match=r"supports vLLM 0.25.0.*; found vLLM 0\.34\.0"):
        plugin.find_seam("0.34.0", tmp_path)


def test_missing_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(plugin.UnsupportedVllm, match="found none"):
        plugin.find_seam("0.33.0", tmp_path)
