"""``nxdt train --max-restarts``: starts this node's launcher again after a rank or a node was lost.

Each node restarts by itself; the launchers of an attempt meet as those of the first one did.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.launch import RestartsNeedResume
from nxdt_core.system.parent import PARENT_VARIABLE

_LOST = 1
"""Exit status of a run in which a rank died or hung, and of a node that lost the others."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a command in good order."""
_VARIABLE = "NXDT_RESTARTER"
"""Process id of the process that starts a command again; set for the command only."""


def interpreter_arguments(config: ResolvedConfig, command: Sequence[str]) -> list[str]:
    """Return the words behind the interpreter that carry out a verb with options for the same configuration."""
    here = sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path
    words = ["-m", "nxdt_core", *command, "--", config.source, *config.overrides]
    return words if here else ["-P", *words]


def is_restarted() -> bool:
    """Return whether the parent of this process starts it again after a loss, and passes signals on to it."""
    return os.environ.get(_VARIABLE) == str(os.getppid())


def run_with_restarts(config: ResolvedConfig, restarts: int, command: Sequence[str]) -> int:
    """Carry out a verb with options in another process, again after each of at most ``restarts`` losses.

    Returns the last exit status.

    Raises:
        RestartsNeedResume: the run would begin again at step 0.
    """
    if not config.run.checkpoint.resume_if_exists:
        raise RestartsNeedResume(restarts=restarts)
    words = [sys.executable, *interpreter_arguments(config, command)]
    for attempt in range(restarts + 1):
        status = _run(words)
        if attempt == restarts or not (status == _LOST or (status < 0 and -status not in SIGNALS)):
            break
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        print(f"The run ended {how}: restart {attempt + 1} of {restarts} from the newest checkpoint", file=sys.stderr)
    return status if status >= 0 else 128 - status


def _run(words: Sequence[str]) -> int:
    """Run a command and pass signals on to it; return its exit status, negative for a signal."""
    parent = str(os.getpid())
    process = subprocess.Popen(words, env={**os.environ, _VARIABLE: parent, PARENT_VARIABLE: parent})

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    with handled_by(pass_on):
        return process.wait()


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let ``handler`` have :data:`SIGNALS` within the block."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
