"""Makes values of the types ``Path`` and ``SourcePath`` absolute: in a file they start at that file's directory,
elsewhere at the working directory. ``package://`` stays as it is in the tree, so that a saved configuration loads on
other machines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nxdt_core.config.fields.types import Mismatch
from nxdt_core.config.sources.node import describe_value
from nxdt_core.config.sources.node import MASK, Node, to_plain
from nxdt_core.config.sources.paths import PACKAGE_SCHEME, PackageNotFound, resolve_path

__all__ = ["Locator"]


@dataclass(frozen=True, slots=True)
class Locator:
    """Knows which file the configuration was read from."""

    source: str

    def locate(self, node: Node) -> Node:
        """Return the node with relative paths made absolute; the same object where it holds none."""
        if isinstance(node.value, list):
            items = [self.locate(item) for item in node.value]
            changed = any(new is not old for new, old in zip(items, node.value, strict=True))
            return replace(node, value=items) if changed else node
        if isinstance(node.value, dict):
            located = {key: self.locate(child) for key, child in node.value.items()}
            changed = any(located[key] is not child for key, child in node.value.items())
            return replace(node, value=located) if changed else node
        if not isinstance(node.value, str) or not node.value or node.value.startswith("/") or "://" in node.value:
            return node
        shown = node.shown
        if shown not in (None, MASK) and not node.value.startswith("~"):
            shown = f"{resolve_path('.', node.origin.directory)}/{shown}"
        return replace(node, value=str(resolve_path(node.value, node.origin.directory)), shown=shown)

    def resolve(self, node: Node) -> Any:
        """Return the plain value with ``package://`` paths made real.

        Raises:
            Mismatch: the package is not installed.
        """
        return _resolved(to_plain(node))


_NAME_BYTES = 255
"""Of a name within a path, which is what Linux accepts."""


def _is_path(text: str) -> bool:
    """Whether the operating system accepts a path; it raises an error even at the question whether others exist."""
    names = text.encode(errors="replace").split(b"/")
    return bool(text) and "\0" not in text and all(len(name) <= _NAME_BYTES for name in names)


def _resolved(value: Any) -> Any:
    if isinstance(value, list):
        return [_resolved(item) for item in value]
    if isinstance(value, dict):
        return {key: _resolved(item) for key, item in value.items()}
    if isinstance(value, str) and not _is_path(value):
        raise Mismatch(describe_value(value))
    if not isinstance(value, str) or not value.startswith(PACKAGE_SCHEME):
        return value
    try:
        return resolve_path(value)
    except PackageNotFound as error:
        raise Mismatch(f"{value!r}, but {error}") from None
