"""A plugin that runs take from a copy of this file: a callback that waits in step 5 until a test has caused a loss.

Next to the copy, ``reached-RANK`` says that a rank waits, and ``lost`` lets all continue.
"""

import time
from pathlib import Path

from nxdt_core.api import Callback, Component, hookimpl

HERE = Path(__file__).parent


class Waits(Callback):
    def __init__(self, config, run_dir): ...

    def on_step_end(self, run):
        if run.step != 5 or (HERE / "lost").exists():
            return
        (HERE / f"reached-{run.rank}").touch()
        while not (HERE / "lost").exists():
            time.sleep(0.02)


@hookimpl
def nxdt_callbacks():
    return [Component(name="waits", target="waits:Waits", summary="Waits in a step for a loss.")]
