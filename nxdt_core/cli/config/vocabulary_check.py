"""Whether the tokenizer fits the model, as far as files on this machine show. Imports no torch."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxdt_core.config.placeholders import is_placeholder
from nxdt_core.errors.models import VocabularyTooSmall

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig
    from nxdt_core.protocols.tokenizer import Tokenizer

__all__ = ["vocabulary_notes"]

_ENDS = {"eos": "end-of-text", "pad": "padding"}


def vocabulary_notes(config: ResolvedConfig) -> list[str]:
    """Return notes for the user about a tokenizer that is built from files; none for one that needs no files.

    Raises:
        VocabularyTooSmall: it has ids that the model has no row for.
        NxdtError: its files are invalid.
    """
    selected = config.components["tokenizer"]
    if selected is None or selected.config is None:
        return []
    paths = [
        path for field in fields(selected.config) if isinstance(path := getattr(selected.config, field.name), Path)
    ]
    if not paths:
        return []
    if any(map(is_placeholder, paths)):
        return []  # it is reported as a value to set
    if absent := [path for path in paths if not path.exists()]:
        return [f"data.tokenizer: {absent[0]} is not on this machine; its vocabulary is not compared with the model's"]
    tokenizer: Tokenizer = selected.component.load_target()(selected.config)
    rows = _rows(config.selected("model").config)
    if rows is not None and tokenizer.vocab_size > rows:
        raise VocabularyTooSmall(tokenizer=tokenizer.vocab_size, model=rows)
    missing = [key for key in _ENDS if getattr(tokenizer, f"{key}_id") is None]
    return [f"data.tokenizer: it has no {_ENDS[key]} token; {key}_token names one" for key in missing]


def _rows(model: Any) -> int | None:
    """Rows of the vocabulary, padding included; None where the model's section does not say."""
    rows: int | None = getattr(model, "vocab_rows", None) or getattr(model, "vocab_size", None)
    return rows
