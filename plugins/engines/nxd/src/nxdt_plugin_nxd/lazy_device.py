"""The device of torch-xla: operations are collected, and run when a program asks for a value or a step ends."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nxdt_core.devices import profile_of

__all__ = ["end_of_step", "join_processes", "lazy_device"]


def lazy_device() -> torch.device:
    """Return this process's device of torch-xla."""
    import torch_xla

    device: torch.device = torch_xla.device()
    return device


def join_processes() -> None:
    """Join the default process group over devices, whose ranks the launcher's variables say."""
    import torch_xla.distributed.xla_backend  # registers the backend

    del torch_xla
    dist.init_process_group("xla", init_method="xla://")


def end_of_step(device: torch.device) -> None:
    """Run what has been collected, so that each step is the same graph."""
    if not profile_of(device).host:
        import torch_xla

        torch_xla.sync()
