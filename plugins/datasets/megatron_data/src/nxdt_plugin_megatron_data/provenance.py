"""The note next to a pair of files about what made them. Megatron's own files have none, and theirs are read
without."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nxdt_core.regular_files import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What the files do not say themselves."""

    tokenizer: str
    """The tokenizer as it was named."""
    fingerprint: str
    """Of that tokenizer."""
    vocab_size: int
    eod_id: int | None
    """The token behind each document; None where none was put."""
    inputs: tuple[str, ...] = ()
    """The files that were read."""

    def text(self) -> str:
        """Return the JSON text that is written."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


def provenance_path(prefix: Path) -> Path:
    """``P.nxdt.json``, a name that no file of text or of a tokenizer has."""
    return prefix.with_name(f"{prefix.name}.nxdt.json")


def read_provenance(prefix: Path) -> Provenance | None:
    """Return the note of a prefix; None where there is none, or where the file is of another program."""
    try:
        content: Any = json.loads(read_text(provenance_path(prefix), follow=True))
        note = Provenance(**{**content, "inputs": tuple(content["inputs"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    texts = (note.tokenizer, note.fingerprint, *note.inputs)
    ids = (note.vocab_size, 0 if note.eod_id is None else note.eod_id)
    sound = all(isinstance(text, str) for text in texts) and all(type(number) is int for number in ids)
    return note if sound else None
