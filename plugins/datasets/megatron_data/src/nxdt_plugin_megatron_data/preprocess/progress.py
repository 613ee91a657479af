"""What is written so far, and the place in the input that it reaches to: made safe together."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxdt_core.regular_files import read_text, regular_opener, replace_text, replacing
from nxdt_plugin_megatron_data.errors import OtherJob
from nxdt_plugin_megatron_data.format import bin_path, idx_path
from nxdt_plugin_megatron_data.preprocess.blocks import Place
from nxdt_plugin_megatron_data.provenance import Note, note_path
from nxdt_plugin_megatron_data.writer import write_index

__all__ = ["Counts", "Output"]

_NAMED = 10
"""Number of faults whose descriptions are kept."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """What has been read and written."""

    documents: int = 0
    tokens: int = 0
    records: int = 0
    empty: int = 0
    """Records whose text has no token."""
    bad: int = 0
    """Records without text."""
    first_bad: list[str] = field(default_factory=list)
    """The first of them: file, line and reason."""

    def add_fault(self, path: Path, line: int, reason: str) -> None:
        """Count a record without text."""
        self.bad += 1
        if len(self.first_bad) < _NAMED:
            self.first_bad.append(f"{path}:{line}: {reason}")


class Output:
    """The files of an unfinished run: tokens, lengths, and how far they go.

    Args:
        prefix: of the files that it becomes.
        dtype: of a token.
        job: digest of what decides the output.

    Raises:
        OtherJob: there is an unfinished run of another job.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any], job: str) -> None:
        self.prefix = prefix
        self.place = Place()
        """Position in the input after what is written."""
        self.counts = Counts()
        self._dtype = dtype
        self._job = job
        self._tokens, self._lengths, self._state = self.unfinished(prefix)
        if self._state.exists() and self._tokens.exists():
            self._go_on()
        self._files = [
            open(path, "r+b" if path.exists() else "w+b", opener=regular_opener)  # noqa: SIM115
            for path in (self._tokens, self._lengths)
        ]
        for file, size in zip(self._files, self._sizes(), strict=True):
            file.truncate(size)
            file.seek(size)

    @staticmethod
    def unfinished(prefix: Path) -> tuple[Path, Path, Path]:
        """Return the files of an unfinished run."""
        tokens, lengths, state = (prefix.with_name(f"{prefix.name}{end}") for end in (".bin.part", ".len.part", ".run"))
        return tokens, lengths, state

    def append(self, tokens: bytes, lengths: NDArray[np.int32], end: Place) -> None:
        """Write the tokens of a block that ends at ``end``.

        Raises:
            OSError: of the disk.
        """
        for file, content in zip(self._files, (tokens, lengths.astype("<i4").tobytes()), strict=True):
            file.write(content)
        self.counts.documents += len(lengths)
        self.counts.tokens += len(tokens) // self._dtype.itemsize
        self.place = end

    def save(self) -> None:
        """Make safe what is written, so that a killed run resumes here.

        Raises:
            OSError: of the disk.
        """
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        state = {"job": self._job, "place": asdict(self.place), "counts": asdict(self.counts)}
        with replacing(self._state) as written:
            written.write(json.dumps(state).encode())
            written.flush()
            os.fsync(written.fileno())

    def finish(self, note: Note) -> None:
        """Give the files their names. The tokens come last: until then, the run there is unfinished.

        Raises:
            OSError: of the disk.
        """
        self.save()
        self.close()
        with open(self._lengths, "rb", opener=regular_opener) as file:
            lengths = np.fromfile(file, "<i4")
        write_index(idx_path(self.prefix), self._dtype, lengths, np.arange(len(lengths) + 1, dtype=np.int64))
        replace_text(note_path(self.prefix), note.text())
        self._tokens.rename(bin_path(self.prefix))
        self._lengths.unlink()
        self._state.unlink()

    def close(self) -> None:
        """Close the files; what was not made safe may be lost, and is written again."""
        for file in self._files:
            file.close()

    def _go_on(self) -> None:
        state = json.loads(read_text(self._state))
        if state["job"] != self._job:
            raise OtherJob(path=str(self.prefix))
        self.place = Place(**state["place"])
        self.counts = Counts(**{each.name: state["counts"][each.name] for each in fields(Counts)})

    def _sizes(self) -> tuple[int, int]:
        return self.counts.tokens * self._dtype.itemsize, self.counts.documents * 4
