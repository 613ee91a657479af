"""The words of a command line as they may be written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nxdt_core.config.secrets.fields import leaf_places
from nxdt_core.config.secrets.messages import Redaction
from nxdt_core.config.sources.node import MASK, Node

if TYPE_CHECKING:
    from nxdt_core.config.resolved import ResolvedConfig

__all__ = ["drop_replaced", "shown_words"]


def shown_words(config: ResolvedConfig, words: Iterable[str]) -> list[str]:
    """Return the words with secrets masked; a reference such as ``${oc.env:NAME}`` stays as it was typed.

    The value of an override that a later one replaces is masked, since the configuration cannot say whether it is
    secret.
    """
    redact, words = Redaction(config.tree), list(words)
    effective = drop_replaced(words)
    return [
        _shown(word, config.tree, redact) if word in effective else f"{word.partition('=')[0]}={MASK}" for word in words
    ]


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


def _shown(word: str, tree: Node, redact: Redaction) -> str:
    key, equals, _ = word.partition("=")
    node = tree.find(key) if equals else None
    if node is not None and any(leaf.shown == MASK for _, leaf in leaf_places(node)):
        return f"{key}={MASK}"
    return redact(word)
