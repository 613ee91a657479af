"""A resolved configuration as a reader wants to see it: YAML with the origin of each value beside it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import click
import yaml

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig

__all__ = ["as_yaml", "with_origins"]

_COMMENT_COLUMN = 48
"""Column where comments stand; longer lines push their own comment to the right."""


def as_yaml(resolved: ResolvedConfig, *, only_set: bool = False) -> str:
    """YAML of all values with ``# origin`` comments; ``only_set`` leaves out those that are defaults."""
    shown = [
        (path.split("."), value)
        for path, value in resolved.values()
        if not (only_set and resolved.origins[path].kind == "default")
    ]
    lines: list[str] = []
    before: list[str] = []
    for path, value in shown:
        common = len([1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, path[:-1], strict=False))])
        lines += [f"{_indent(depth)}{path[depth]}:" for depth in range(common, len(path) - 1)]
        text = f"{_indent(len(path) - 1)}{path[-1]}: {_scalar(value)}"
        origin = str(resolved.origins[".".join(path)])
        lines.append(f"{text:<{_COMMENT_COLUMN - 1}} {click.style(f'# {origin}', dim=True)}")
        before = path
    return "\n".join(lines) + "\n"


def with_origins(resolved: ResolvedConfig) -> dict[str, Any]:
    """The shape of ``nxdt config show --json``: the plain tree, and the origin of each key path."""
    return {
        "config": resolved.to_dict(),
        "origins": dict(_origins(resolved)),
    }


def _origins(resolved: ResolvedConfig) -> Iterator[tuple[str, dict[str, object]]]:
    for path, _ in resolved.values():
        origin = resolved.origins[path]
        yield path, {"kind": origin.kind, "where": origin.where, "line": origin.line or None}


def _indent(depth: int) -> str:
    return "  " * depth


def _scalar(value: object) -> str:
    """One value in YAML's flow style, on one line; a list around it keeps the dumper from ending the document."""
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
