"""Runs a command as a person does: on a terminal, which shows colours and bars that pipes do not get."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import termios
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

__all__ = ["on_terminal"]

_ROWS, _COLUMNS = 40, 120


def on_terminal(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 240,
    popen: type[subprocess.Popen[Any]] = subprocess.Popen,
    columns: int = _COLUMNS,
) -> tuple[int, str]:
    """Exit status of a command, and all that a terminal gets of it.

    Args:
        command: the program and its arguments.
        cwd: where it runs.
        env: its environment; None: this process's.
        timeout_s: after which it is killed, with the processes that it started.
        popen: starts it.
        columns: width of the terminal; ``COLUMNS`` in ``env`` goes before it.
    """
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (_ROWS, columns))
    process = popen(command, cwd=cwd, env=env, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    late = Timer(timeout_s, os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    try:
        text = b"".join(_parts(ours)).decode("utf-8", "replace")
        return process.wait(), text.replace("\r\n", "\n")
    finally:
        late.cancel()
        os.close(ours)


def _parts(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # Linux says so when the last writer has gone
            return
        if not part:
            return
        yield part
