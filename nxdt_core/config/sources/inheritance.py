"""``base``: a file that says only in what it differs from another file or recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nxdt_core.config.sources.node import describe_value
from nxdt_core.config.sources.files import Source, read_source
from nxdt_core.config.sources.node import Node, merge, to_plain
from nxdt_core.config.sources.overrides import COMMAND_LINE
from nxdt_core.config.sources.paths import PackageNotFound, resolve_path
from nxdt_core.config.sources.recipes import RECIPE_SCHEME
from nxdt_core.errors.configuration import ConfigProblem, WrongValue
from nxdt_core.kernel import Kernel

__all__ = ["read_based"]

_KEY = "base"


def read_based(
    source: str | Path | Mapping[str, Any],
    find_kernel: Callable[[Node], Kernel],
    label: str | None = None,
    merging: Callable[[Node, Node], object] = lambda low, high: None,
    convert: Callable[[Source, Node], Source] = lambda source, above: source,
) -> Source:
    """Read a source and, below it, what it is based on; problems are returned, not raised.

    Args:
        source: A path, ``recipe:NAME``, or a mapping.
        find_kernel: Given what was read so far, called where a recipe is named; its plugins bring the recipes.
        label: What a mapping is called.
        merging: Called with each tree below and with what it is about to be merged under.
        convert: Given each source as it was read, and what is above it; returns what takes its place.
    """
    nothing = Node({}, COMMAND_LINE)
    top = convert(read_source(source, partial(find_kernel, nothing), label=label), nothing)
    tree, problems, seen, below, stem = top.tree.without(_KEY), [*top.problems], [top.label], top, top.stem
    while below.readable and (node := below.tree.find(_KEY)) is not None and node.value is not None:
        named = _named(node, seen)
        if isinstance(named, ConfigProblem):
            return replace(top, problems=(*problems, named), readable=False)
        seen.append(named)
        below = convert(read_source(named, partial(find_kernel, tree), node.origin.at(_KEY)), tree)
        stem = stem or below.stem
        problems += below.problems
        merging(below.tree, tree)
        tree = merge(below.tree.without(_KEY), tree)
    return replace(top, tree=tree, problems=tuple(problems), readable=below.readable, stem=stem)


def _named(node: Node, seen: list[str]) -> str | ConfigProblem:
    """The source that ``base`` names; a problem where it names none, or one that is based on this one."""
    text, allowed = node.value, f"the path of a YAML file, or {RECIPE_SCHEME}NAME"
    if not isinstance(text, str):
        return WrongValue(**node.origin.at(_KEY), found=describe_value(to_plain(node)), allowed=allowed)
    try:
        named = text if text.startswith(RECIPE_SCHEME) else str(resolve_path(text, node.origin.directory))
    except PackageNotFound as error:
        return WrongValue(**node.origin.at(_KEY), found=f"{text!r}, but {error}", allowed=allowed)
    if named in seen:
        found = f"{text!r}, which is itself based on this file"
        return WrongValue(**node.origin.at(_KEY), found=found, allowed="a file that is not")
    return named
