"""Addresses with credentials in them, and masks that replace a secret."""

from __future__ import annotations

import re

from nxdt_core.config.secrets.fields import dotted, leaf_places
from nxdt_core.config.sources.node import MASK, Node, replaced
from nxdt_core.errors.configuration import ConfigProblem, CredentialsInAddress, SecretNotKept

__all__ = ["hide_credentials", "without_credentials"]

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
    return _WORD.sub(lambda word: _masked(word[0]), text) if ":/" in text else text


def _masked(word: str) -> str:
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
    for path, node in list(leaf_places(tree)):
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
