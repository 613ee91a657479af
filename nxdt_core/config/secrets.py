"""Values that are not shown or written: those of secret fields, of the environment, and credentials in addresses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from nxdt_core.config.annotations import Secret
from nxdt_core.config.section import LISTS, TABLES, is_model, keys_of
from nxdt_core.config.tree import (
    MASK,
    KeyPath,
    Node,
    describe_value,
    dotted,
    find_node,
    mapped,
    replaced,
    to_plain,
    walk,
)
from nxdt_core.errors.configuration import ConfigProblem, CredentialsInAddress, SecretNotKept

if TYPE_CHECKING:
    from nxdt_core.config.schema import ResolvedConfig

__all__ = [
    "Redaction",
    "describe_node",
    "drop_replaced",
    "hide_credentials",
    "hide_secrets",
    "is_hidden",
    "mask_fields",
    "notes_on_secrets",
    "shown_words",
    "without_credentials",
]


def mask_fields(tree: Node, sections: Iterable[tuple[KeyPath, type]]) -> Node:
    """Return the tree with a mask for each literal value of a secret field.

    Args:
        tree: with interpolations resolved.
        sections: where each section has its keys.
    """
    for path, cls in sections:
        node = find_node(tree, path)
        if node is not None and isinstance(node.value, dict):
            tree = replaced(tree, path, _masked(node, cls))
    return tree


def _masked(node: Node, annotation: Any) -> Node:
    """Return the node with masks where the annotation of its values, or of some below, says that they are secret."""
    origin, arguments, value = get_origin(annotation), get_args(annotation), node.value
    if origin is Annotated:
        secret = any(isinstance(mark, Secret) for mark in annotation.__metadata__)
        return mapped(node, _mask) if secret else _masked(node, annotation.__origin__)
    if origin in (Union, UnionType):
        for member in arguments:
            node = _masked(node, member)
        return node
    if is_model(annotation) and isinstance(value, dict):
        keys = keys_of(annotation)
        value = {
            name: _masked(child, keys[name].annotation) if name in keys else child for name, child in value.items()
        }
    elif origin in TABLES and len(arguments) == 2 and isinstance(value, dict):
        value = {name: _masked(child, arguments[1]) for name, child in value.items()}
    elif origin in LISTS and isinstance(value, list) and arguments:
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        kinds = (*arguments, *[Any] * len(value)) if fixed else arguments[:1] * len(value)
        value = [_masked(item, kind) for item, kind in zip(value, kinds, strict=False)]
    return Node(value, node.origin, node.shown)


def _mask(node: Node) -> Node:
    literal = node.shown is None and node.origin.kind != "default" and node.value not in (None, "")
    return Node(node.value, node.origin, MASK) if literal and not isinstance(node.value, (dict, list)) else node


_SCHEME = r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,63}):"  # bounded: a long value would take the square of its length
_USER = (
    r"(?:[^/?#@\s'\"]*@(?:[^/?#@\s'\"]*@)*"  # before the host
    r"|[^/?#@:\s'\"]+:(?!\d+(?:[/?#]|$))[^@\s'\"]*@)"  # a secret key of AWS may hold a slash
)
_CREDENTIALS = re.compile(f"{_SCHEME}//{_USER}")
_SHOWN = re.compile(f"{_SCHEME}//?{_USER}")
"""In messages: an address that was taken for a path has one slash less."""

_REFERENCE = re.compile(r"(?:[^:@{}$]*:)?\$\{oc\.env:\w+\}@")
"""Credentials whose secret part is a reference to a variable, after a user name that may be literal."""

_WORD = re.compile(r"[^\s'\"]+")
"""Text that may contain an address."""


def without_credentials(text: str) -> str:
    """Return the text with credentials of the addresses in it masked; references to variables stay."""
    return _WORD.sub(lambda word: _without(word[0]), text) if ":/" in text else text


def _without(word: str) -> str:
    searched, at, rest = word.rpartition("@")  # behind it, each search would reach the end in vain
    return _SHOWN.sub(_without_secret, searched + at) + rest


def _without_secret(found: re.Match[str]) -> str:
    user = found[0].partition("/")[2].lstrip("/")
    return found[0] if _REFERENCE.fullmatch(user) else f"{found['scheme']}://{MASK}@"


def hide_credentials(tree: Node) -> tuple[Node, list[ConfigProblem]]:
    """Return the tree with masked addresses where they hold credentials, and a problem for each.

    An address that comes from a variable may hold them, since its reference is written; not so those of checkpoints,
    which are printed. A mask in place of a value is a problem, too.
    """
    problems: list[ConfigProblem] = []
    for path, node in list(walk(tree)):
        if not isinstance(node.value, str):
            continue
        if node.value == MASK:
            problems.append(SecretNotKept(**node.origin.at(dotted(path))))
        found = _CREDENTIALS.match(node.value)
        if found is None or (node.shown is not None and path[0] != "checkpoint"):
            continue
        masked = without_credentials(node.value)
        problems.append(
            CredentialsInAddress(**node.origin.at(dotted(path)), found=masked, scheme=found["scheme"].lower())
        )
        tree = replaced(tree, path, Node(node.value, node.origin, node.shown or masked))
    return tree, problems


_VARIABLE = re.compile(r"oc\.env\s*:\s*([^\s,{}$]+)")
_SHORTEST = 6
"""Characters of a value that is looked for within other text: shorter ones are part of ordinary words."""


def is_hidden(node: Node) -> bool:
    """Return whether the value, or one below it, must not be shown."""
    return any(each.shown is not None for _, each in walk(node))


def describe_node(node: Node) -> str:
    """Describe a found value, as :func:`~nxdt_core.config.tree.describe_value`, without hidden values."""
    if not is_hidden(node):
        return describe_value(to_plain(node))
    kind = describe_value(to_plain(node)).rpartition(" (")[2].rstrip(")")
    return f"{describe_value(to_plain(node, shown=True)).rpartition(' (')[0]} ({kind})"


class Redaction:
    """Replaces the hidden values of a configuration in any text by what is shown in their place."""

    def __init__(self, *trees: Node) -> None:
        self._shown: dict[str, str] = {}
        for tree in trees:
            self.learn(tree)

    def learn(self, tree: Node, *, references: bool = True) -> None:
        """Replace the hidden values of another tree, too. Those of ``references`` may be defaults."""
        self._add(pair for pair in _hidden_texts(tree) if references or MASK in pair[1])

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
    for path, node in walk(tree):
        if node.shown == MASK and not isinstance(node.value, (dict, list)):
            yield (
                f"{dotted(path)}: the secret is masked in what the run writes, so it must be given again to resume."
                " Write ${oc.env:NAME}, with the secret in that variable"
            )


def _hidden_texts(tree: Node) -> Iterator[tuple[str, str]]:
    """Each hidden text and what to show; those of variables within a longer one, too."""
    for _, node in walk(tree):
        if node.shown is None:
            continue
        if isinstance(node.value, str):
            yield node.value, node.shown
        yield from _values_of(variables_of(node.shown))
        if node.shown == MASK and isinstance(node.value, (int, float)):
            yield str(node.value), MASK


def variables_of(text: str) -> list[str]:
    """Return the variables that an interpolation names by itself."""
    return _VARIABLE.findall(text)


def _values_of(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        if value := os.environ.get(name):
            yield value, f"${{oc.env:{name}}}"


def _forms(value: str) -> set[str]:
    """Return the text as messages spell it: as it is, quoted by Python or JSON, or as a path."""
    return {value, repr(value)[1:-1], json.dumps(value)[1:-1], os.path.normpath(value)}


def shown_words(config: ResolvedConfig, words: Iterable[str]) -> list[str]:
    """Return the words with secrets masked; a reference such as ``${oc.env:NAME}`` stays as it was typed.

    The value of an override that a later one replaces is masked, since the configuration cannot say whether it is
    secret.
    """
    redact, words, shown = Redaction(config.tree), list(words), list[str]()
    effective = drop_replaced(words)
    for word in words:
        key, equals, _ = word.partition("=")
        node = config.tree.find(key) if equals else None
        secret = node is not None and any(each.shown == MASK for _, each in walk(node))
        shown.append(f"{key}={MASK}" if secret or word not in effective else redact(word))
    return shown


def drop_replaced(words: Sequence[str]) -> list[str]:
    """Return the overrides without those that a later one of the same key replaces; mappings are merged, so they stay.

    What has no effect may hold a secret that the configuration no longer knows.
    """
    found: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and not word.startswith("-") and not value.lstrip().startswith("{"):
            found = [each for each in found if each.partition("=")[0] != key]
        found.append(word)
    return found
