"""Reads what PyYAML drops from a file: comments, and the original text of each value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from nxdt_core.config.tree import join

__all__ = ["Comments", "read_comments"]


@dataclass(frozen=True, slots=True)
class Comments:
    """Comments and value texts of a YAML file. Lines are counted from 1."""

    beside: dict[int, str] = field(default_factory=dict)
    """Line → the comment at its end."""
    above: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Line → the lines of comments directly above it."""
    values: dict[str, str] = field(default_factory=dict)
    """Key path → the value's original text, if it is on one line and has the same meaning anywhere in the file."""


def read_comments(text: str) -> Comments:
    """Return comments and value texts of a document that has been parsed before and is known to be valid."""
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
            pending = []  # comments before a blank line belong to no key
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
    """Whether the node's text means the same at another place: it is not a block and contains no anchor or alias."""
    if isinstance(node, yaml.SequenceNode):
        return bool(node.flow_style) and not set("&*\n") & set(own)
    return node.style in (None, "'", '"') and "\n" not in own and own[:1] not in ("", "&", "!")
