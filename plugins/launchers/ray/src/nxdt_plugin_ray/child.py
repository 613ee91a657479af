"""``nxdt`` as the child of an actor: ``python -m nxdt_plugin_ray.child train …`` ends with the actor.

Otherwise what a lost actor has started would train on, next to the next attempt.
"""

from __future__ import annotations

import runpy
import signal

from nxdt_core.system.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)
    runpy.run_module("nxdt_core", run_name="__main__", alter_sys=True)
