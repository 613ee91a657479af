"""``nxdt`` as the child of an actor: ``python -m nxdt_plugin_ray.child train …`` ends with the actor.

Otherwise what a lost actor has started would train on, next to the next attempt.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

ACTOR_VARIABLE = "NXDT_RAY_ACTOR"
"""Process id of the actor, set for its child only."""
_PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of prctl(2)."""

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.environ.pop(ACTOR_VARIABLE, str(os.getppid())) != str(os.getppid()):  # it ended before this line
            os.kill(os.getpid(), signal.SIGTERM)
    runpy.run_module("nxdt_core", run_name="__main__", alter_sys=True)
