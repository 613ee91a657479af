"""``nxdt train --max-restarts``: a process that starts this node's launcher again after a rank or a node was lost.

Each node restarts by itself; the launchers of an attempt meet as those of the first one did. No torch is imported in
the process that stays, and each attempt is a fork of it, with the configuration that was checked.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.clusters import RestartsNeedResume

__all__ = ["check_resumes", "in_restarted_child"]

_LOST = 1
"""Exit status of a run in which a rank died or hung, and of a node that lost the others."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def check_resumes(config: ResolvedConfig, restarts: int) -> None:
    """Check that a restart would resume.

    Raises:
        RestartsNeedResume: it would begin at step 0.
    """
    if not config.run.exp_manager.resume_if_exists:
        raise RestartsNeedResume(restarts=restarts)


def in_restarted_child(restarts: int) -> int | None:
    """Return None in a child process, which carries out the run, and the last child's exit status in this one.

    Args:
        restarts: how often another child is started after one that was lost.
    """
    for attempt in range(restarts + 1):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            return None
        status = _wait(pid)
        signalled = status < 0 and -status not in _SIGNALS
        if attempt == restarts or not (status == _LOST or signalled):
            break
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        print(f"The run ended {how}: restart {attempt + 1} of {restarts} from the newest checkpoint", file=sys.stderr)
    return status if status >= 0 else 128 - status


def _wait(pid: int) -> int:
    """Pass signals on to a child until it ends; return its exit status, negative for a signal."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(pid, number)

    before = {number: signal.signal(number, pass_on) for number in _SIGNALS}
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
