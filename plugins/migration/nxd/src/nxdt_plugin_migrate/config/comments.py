"""What PyYAML drops when it reads a file: comments, and how each value was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from nxdt_core.config.sources.node import join

__all__ = ["Comments", "read_comments"]


@dataclass(frozen=True, slots=True)
class Comments:
    """The looks of a YAML text. Lines are counted from 1."""

    beside: dict[int, str] = field(default_factory=dict)
    """Line → the comment behind what stands on it."""
    above: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Line → the lines of comments directly above it."""
    values: dict[str, str] = field(default_factory=dict)
    """Key path → the value's own text, where that is on one line and means the same anywhere."""


def read_comments(text: str) -> Comments:
    """Comments and texts of a document that has been parsed before, so that it is known to be sound."""
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    values: dict[str, str] = {}
    _collect(root, "", text, values)
    return Comments(*_comments(text), values)


def _comments(text: str) -> tuple[dict[int, str], dict[int, tuple[str, ...]]]:
    lines = text.splitlines()
    ends: dict[int, int] = {}
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if token.end_mark.column and not isinstance(token, (yaml.BlockEndToken, yaml.StreamEndToken)):
            ends[token.end_mark.line] = max(ends.get(token.end_mark.line, 0), token.end_mark.column)
    beside: dict[int, str] = {}
    above: dict[int, tuple[str, ...]] = {}
    pending: list[str] = []
    for number, line in enumerate(lines):
        rest = line[ends.get(number, 0) :].strip()
        if number in ends:
            if rest.startswith("#"):
                beside[number + 1] = rest
            if pending:
                above[number + 1] = tuple(pending)
            pending = []
        elif rest.startswith("#"):
            pending.append(rest)
        elif not rest:
            pending = []  # a paragraph of its own belongs to no key
    return beside, above


def _collect(node: Any, path: str, text: str, values: dict[str, str]) -> None:
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        for key, value in node.value:
            _collect(value, join(path, str(key.value)), text, values)
    elif path and isinstance(node, (yaml.ScalarNode, yaml.SequenceNode)):
        own = text[node.start_mark.index : node.end_mark.index]
        if _stands_alone(node, own):
            values[path] = own


def _stands_alone(node: Any, own: str) -> bool:
    """Whether the text of the node means the same at another place: no block, and no anchor or name of one."""
    if isinstance(node, yaml.SequenceNode):
        return bool(node.flow_style) and not set("&*\n") & set(own)
    return node.style in (None, "'", '"') and "\n" not in own and own[:1] not in ("", "&", "!")
