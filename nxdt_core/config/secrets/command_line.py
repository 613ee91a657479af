"""The words of a command line as they may be written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nxdt_core.config.secrets.fields import leaf_places
from nxdt_core.config.secrets.messages import Redaction
from nxdt_core.config.sources.node import MASK, Node

if TYPE_CHECKING:
    from nxdt_core.config.resolved import ResolvedConfig

__all__ = ["shown_words"]


def shown_words(config: ResolvedConfig, words: Iterable[str]) -> list[str]:
    """Return the words with secrets masked; a reference such as ``${oc.env:NAME}`` stays as it was typed."""
    redact = Redaction(config.tree)
    return [_shown(word, config.tree, redact) for word in words]


def _shown(word: str, tree: Node, redact: Redaction) -> str:
    key, equals, _ = word.partition("=")
    node = tree.find(key) if equals else None
    if node is not None and any(leaf.shown == MASK for _, leaf in leaf_places(node)):
        return f"{key}={MASK}"
    return redact(word)
