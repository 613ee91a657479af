"""What code under test writes and starts, as the interpreter's audit events say it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["side_effects"]

_STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"}
_WRITES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
_lists: list[list[str]] = []
"""Those that are being filled; an audit hook cannot be removed, so that there is one."""
_installed: list[bool] = []


@contextmanager
def side_effects() -> Iterator[Sequence[str]]:
    """Collect what the body writes and starts, a phrase such as ``writes job.sh`` for each.

    Example::

        with side_effects() as found:
            launcher.submission(job, options)
        assert not found
    """
    if not _installed:
        sys.addaudithook(_note)
        _installed.append(True)
    found: list[str] = []
    _lists.append(found)
    try:
        yield found
    finally:
        _lists.remove(found)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if not _lists:
        return
    phrase = ""
    if event in _STARTS:
        phrase = f"starts {arguments[0] if arguments else 'a process'}"
    elif event in _WRITES or (event == "open" and _is_for_writing(*arguments)):
        phrase = f"writes {arguments[0]}"
    if phrase:
        for each in _lists:
            each.append(phrase)


def _is_for_writing(path: object, mode: str | None, flags: int) -> bool:
    """Whether a file is opened for writing; bytecode that Python keeps of imported modules does not count."""
    cached = "__pycache__" in str(path)
    return not cached and bool(flags & (os.O_WRONLY | os.O_RDWR))
