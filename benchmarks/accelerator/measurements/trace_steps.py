"""A local plugin that writes a profiler trace of some steps; used by ``traces``."""

from __future__ import annotations

import os

from nxdt_core.api import hookimpl

__all__ = ["FILE", "FIRST", "LAST"]

FILE = "NXDT_BENCHMARK_TRACE"
"""Environment variable: the file to write."""
FIRST, LAST = 5, 8
"""Steps at whose ends the trace begins and is written."""

_running: list[object] = []


@hookimpl
def nxdt_step_end(context: object) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    step = context.step  # type: ignore[attr-defined]
    if step not in (FIRST, LAST):
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.accelerator.synchronize()
    if step == FIRST:
        kind = "CPU" if accelerator is None else accelerator.type.upper()  # of a device: its kernels and runtime calls
        _running.append(profile(activities=[getattr(ProfilerActivity, kind)]).__enter__())
    else:
        profiler = _running.pop()
        profiler.__exit__(None, None, None)  # type: ignore[attr-defined]
        profiler.export_chrome_trace(os.environ[FILE])  # type: ignore[attr-defined]
