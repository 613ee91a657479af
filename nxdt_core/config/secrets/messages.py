"""Texts for people and files, without the values that must not be shown."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from nxdt_core.config.sources.node import describe_value
from nxdt_core.config.secrets.addresses import without_credentials
from nxdt_core.config.secrets.environment import variables_of
from nxdt_core.config.secrets.fields import dotted, leaf_places
from nxdt_core.config.sources.node import MASK, Node, to_plain, to_shown

__all__ = ["Redaction", "describe_node", "hide_secrets", "is_hidden", "notes_on_secrets"]

_SHORTEST = 6
"""Characters of a value that is looked for within other text: shorter ones are part of ordinary words."""


def is_hidden(node: Node) -> bool:
    """Return whether the value, or one below it, must not be shown."""
    return any(each.shown is not None for each in _nodes(node))


def describe_node(node: Node) -> str:
    """Describe a found value, as :func:`~nxdt_core.config.sources.node.describe_value`, without hidden values."""
    if not is_hidden(node):
        return describe_value(to_plain(node))
    kind = describe_value(to_plain(node)).rpartition(" (")[2].rstrip(")")
    return f"{describe_value(to_shown(node)).rpartition(' (')[0]} ({kind})"


class Redaction:
    """Replaces the hidden values of a configuration in any text by what is shown in their place."""

    def __init__(self, *trees: Node) -> None:
        self._shown: dict[str, str] = {}
        for tree in trees:
            self.learn(tree)

    def learn(self, tree: Node) -> None:
        """Replace the hidden values of another tree, too."""
        self._add(_hidden_texts(tree))

    def learn_masked(self, tree: Node) -> None:
        """Replace the values of another tree that have a mask, too; those of references may be defaults."""
        self._add(pair for pair in _hidden_texts(tree) if MASK in pair[1])

    def learn_variables(self, names: Iterable[str]) -> bool:
        """Replace the values of variables of the environment, too; return whether one of them is set."""
        found = dict(_values_of(names))
        self._add(found.items())
        return bool(found)

    def _add(self, pairs: Iterable[tuple[str, str]]) -> None:
        for value, shown in pairs:
            for form in _forms(value):
                if len(form) >= _SHORTEST and self._shown.get(form, MASK) == MASK:  # a reference says more
                    self._shown[form] = shown

    def __call__(self, text: str) -> str:
        """Return the text without them."""
        for value, shown in sorted(self._shown.items(), key=lambda pair: -len(pair[0])):
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
        if type(found) in (tuple, list) and all(isinstance(item, str) for item in found):
            return type(found)(map(self, found))
        return found


hide_secrets = Redaction()
"""Hides the secrets of all configurations that this process has resolved, in a text that is about to be printed."""


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
        yield from _values_of(variables_of(node.shown))
        if node.shown == MASK and isinstance(node.value, (int, float)):
            yield str(node.value), MASK


def _values_of(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        if value := os.environ.get(name):
            yield value, f"${{oc.env:{name}}}"


def _forms(value: str) -> set[str]:
    """Return the text as messages spell it: as it is, quoted by Python or JSON, or as a path."""
    return {value, repr(value)[1:-1], json.dumps(value)[1:-1], os.path.normpath(value)}
