"""Values that are not shown or written: those of secret fields, of the environment, and credentials in addresses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nxdt_core.config.annotations import Secret
from nxdt_core.config.section import Key, marked
from nxdt_core.config.tree import MASK, KeyPath, Tree, dotted, walk
from nxdt_core.errors.configuration import ConfigProblem, CredentialsInAddress, SecretNotKept

if TYPE_CHECKING:
    from nxdt_core.config.schema import ResolvedConfig

__all__ = [
    "Redaction",
    "drop_replaced",
    "hide_credentials",
    "hide_secrets",
    "mask_secrets",
    "notes_on_secrets",
    "shown_words",
    "without_credentials",
]


def mask_secrets(tree: Tree, key: Key, path: KeyPath) -> None:
    """Show a mask in place of each literal value in a key's value that its annotation says is secret."""
    for below in marked(Secret, key.annotation, tree.get(path), path) if Secret in key.marks_inside else ():
        written = tree.get(below) not in (None, "") and tree.origins[below].kind != "default"
        if written and below not in tree.shown:
            tree.shown[below] = MASK


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

    def masked(found: re.Match[str]) -> str:
        user = found[0].partition("/")[2].lstrip("/")
        return found[0] if _REFERENCE.fullmatch(user) else f"{found['scheme']}://{MASK}@"

    def in_word(word: re.Match[str]) -> str:
        searched, at, rest = word[0].rpartition("@")  # behind it, each search would reach the end in vain
        return _SHOWN.sub(masked, searched + at) + rest

    return _WORD.sub(in_word, text) if ":/" in text else text


def hide_credentials(tree: Tree) -> Iterator[ConfigProblem]:
    """Mask the addresses that hold credentials, and yield a problem for each.

    An address that comes from a variable may hold them, since its reference is written; not so those of checkpoints,
    which are printed. A mask in place of a value is a problem, too.
    """
    for path, value in walk(tree.data):
        if not isinstance(value, str):
            continue
        if value == MASK:
            yield SecretNotKept(**tree.origins[path].at(dotted(path)))
        found = _CREDENTIALS.match(value) if "://" in value else None
        if found is None or (path in tree.shown and path[0] != "checkpoint"):
            continue
        masked = without_credentials(value)
        yield CredentialsInAddress(**tree.origins[path].at(dotted(path)), found=masked, scheme=found["scheme"].lower())
        tree.shown.setdefault(path, masked)


_VARIABLE = re.compile(r"oc\.env\s*:\s*([^\s,{}$]+)")
_SHORTEST = 6
"""Characters of a value that is looked for within other text: shorter ones are part of ordinary words."""


class Redaction:
    """Replaces the hidden values of a configuration in any text by what is shown in their place."""

    def __init__(self, *trees: Tree) -> None:
        self._shown: dict[str, str] = {}
        for tree in trees:
            self.learn(tree)

    def learn(self, tree: Tree, path: KeyPath = (), *, references: bool = True) -> None:
        """Replace the hidden values of another tree, too. Those of ``references`` may be defaults."""
        for below, shown in tree.shown.items():
            value, masked = tree.get(below), MASK in shown
            if below[: len(path)] != path or not (references or masked):
                continue
            if isinstance(value, str) or (shown == MASK and isinstance(value, (int, float))):
                self._add(str(value), shown)
            self.learn_variables(_VARIABLE.findall(shown))

    def learn_variables(self, names: Iterable[str]) -> bool:
        """Replace the values of variables of the environment, too; return whether one of them is set."""
        values = {name: value for name in names if (value := os.environ.get(name))}
        for name, value in values.items():
            self._add(value, f"${{oc.env:{name}}}")
        return bool(values)

    def _add(self, value: str, shown: str) -> None:
        # As messages spell it: as it is, quoted by Python or JSON, or as a path.
        for form in {value, repr(value)[1:-1], json.dumps(value)[1:-1], os.path.normpath(value)}:
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


def notes_on_secrets(tree: Tree) -> Iterator[str]:
    """Yield a line for each secret that was written literally."""
    for path, _ in walk(tree.data) if MASK in tree.shown.values() else ():
        if tree.shown.get(path) == MASK:
            yield (
                f"{dotted(path)}: the secret is masked in what the run writes, so it must be given again to resume."
                " Write ${oc.env:NAME}, with the secret in that variable"
            )


def shown_words(config: ResolvedConfig, words: Iterable[str]) -> list[str]:
    """Return the words with secrets masked; a reference such as ``${oc.env:NAME}`` stays as it was typed.

    The value of an override that a later one replaces is masked, since the configuration cannot say whether it is
    secret.
    """
    redact, words, shown = Redaction(config.tree), list(words), list[str]()
    effective = drop_replaced(words)
    for word in words:
        key, equals, _ = word.partition("=")
        below = tuple(key.split("."))
        secret = equals and any(text == MASK and at[: len(below)] == below for at, text in config.tree.shown.items())
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
