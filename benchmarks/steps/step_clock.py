"""A local plugin whose callback notes the CPU clock after each optimizer step; used by benchmarks of this folder."""

from __future__ import annotations

import time

from nxdt_core.api import Callback, Component, Run, hookimpl

ticks: list[float] = []
"""``time.process_time()`` after each step of the newest run."""


class Clock(Callback):
    def __init__(self, config: object, run_dir: object) -> None: ...

    def on_fit_start(self, run: Run) -> None:
        ticks.clear()

    def on_step_end(self, run: Run) -> None:
        ticks.append(time.process_time())


@hookimpl
def nxdt_callbacks() -> list[Component]:
    return [Component(name="clock", target=f"{__name__}:Clock")]
