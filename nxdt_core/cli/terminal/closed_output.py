"""A closed output does not end a run: ``nxdt train … | head`` trains to its end."""

from __future__ import annotations

import io
import os
import sys

__all__ = ["survive_closed_output"]


def survive_closed_output() -> None:
    """Let standard output and standard error of this process drop what is written once their reader has gone.

    The log files of a run keep all of it.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            setattr(sys, name, _Surviving(stream))


class _Surviving(io.TextIOWrapper):
    def __init__(self, stream: io.TextIOWrapper) -> None:
        """``stream``: whose buffer this writes to."""
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._stream = stream  # which would close the buffer with its last reference

    def write(self, text: str, /) -> int:
        """Write ``text``, or drop it."""
        try:
            return super().write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop what is left."""
        try:
            super().flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
