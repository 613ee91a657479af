"""Texts for people and files, without the values that must not be shown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from nxdt_core.config.fields.types import describe_value
from nxdt_core.config.secrets.addresses import without_credentials
from nxdt_core.config.secrets.environment import variables_of
from nxdt_core.config.secrets.fields import dotted, leaf_places
from nxdt_core.config.sources.node import MASK, Node, to_plain, to_shown

__all__ = ["Redaction", "describe_node", "is_hidden", "notes_on_secrets"]

_SHORTEST = 6
"""Characters of a value that is looked for within other text: shorter ones are part of ordinary words."""


def is_hidden(node: Node) -> bool:
    """Return whether the value, or one below it, must not be shown."""
    return any(each.shown is not None for each in _nodes(node))


def describe_node(node: Node) -> str:
    """Describe a found value, as :func:`~nxdt_core.config.fields.types.describe_value`, without hidden values."""
    if not is_hidden(node):
        return describe_value(to_plain(node))
    kind = describe_value(to_plain(node)).rpartition(" (")[2].rstrip(")")
    return f"{describe_value(to_shown(node)).rpartition(' (')[0]} ({kind})"


class Redaction:
    """Replaces the hidden values of a configuration in any text by what is shown in their place."""

    def __init__(self, *trees: Node) -> None:
        pairs = {value: shown for tree in trees for value, shown in _hidden_texts(tree) if len(value) >= _SHORTEST}
        self._pairs = sorted(pairs.items(), key=lambda pair: -len(pair[0]))

    def __call__(self, text: str) -> str:
        """Return the text without them."""
        for value, shown in self._pairs:
            text = text.replace(value, shown)
        return without_credentials(text)

    def redact_error(self, error: BaseException) -> None:
        """Replace them in what an error carries, and in the errors that led to it."""
        pending, seen = [error], set[int]()
        while pending:
            each = pending.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            each.args = tuple(map(self._redacted, each.args))
            for name, found in [*vars(each).items(), ("filename", getattr(each, "filename", None))]:
                if isinstance(found, BaseException):
                    pending.append(found)
                elif name != "key" and self._redacted(found) != found:
                    setattr(each, name, self._redacted(found))
            pending += [linked for linked in (each.__cause__, each.__context__) if linked is not None]

    def _redacted(self, found: Any) -> Any:
        """Return the text, or the list of texts, without them; anything else as it is."""
        if isinstance(found, str):
            return self(found)
        if isinstance(found, (tuple, list)) and all(isinstance(item, str) for item in found):
            return type(found)(map(self, found))
        return found


def notes_on_secrets(tree: Node) -> Iterator[str]:
    """Yield a line for each secret that was written literally."""
    for path, node in leaf_places(tree):
        if node.shown == MASK:
            yield (
                f"{dotted(path)}: the secret is masked in what the run writes, so it must be given again to resume."
                " Write ${oc.env:NAME}, with the secret in that variable"
            )


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    children: Any = node.value.values() if isinstance(node.value, dict) else node.value
    for child in children if isinstance(node.value, (dict, list)) else ():
        yield from _nodes(child)


def _hidden_texts(tree: Node) -> Iterator[tuple[str, str]]:
    """Each hidden text and what to show; those of variables within a longer one, too."""
    for node in _nodes(tree):
        if node.shown is None:
            continue
        if isinstance(node.value, str):
            yield node.value, node.shown
        for name in variables_of(node.shown):
            if value := os.environ.get(name):
                yield value, f"${{oc.env:{name}}}"
        if node.shown == MASK and isinstance(node.value, (int, float)):
            yield str(node.value), MASK
