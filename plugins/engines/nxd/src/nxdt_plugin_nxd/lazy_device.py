"""The device of torch-xla: operations are collected, and run when a program asks for a value or a step ends."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nxdt_core.distributed.device_operations import MEMORY_GIB, PEAK_FLOPS, UnknownDeviceOperations, product_name
from nxdt_core.distributed.devices import DeviceProfile, profile_of, register_profile


class LazyDeviceOperations(UnknownDeviceOperations):
    """Operations of torch-xla's device: it has no index to choose and no generator that a run depends on."""

    def is_available(self, device_type: str) -> bool:
        """Return True: the engine has found the device before it registers the profile."""
        return True

    def count(self) -> int:
        """Return 1: each process has its own device."""
        return 1

    def name(self, device: torch.device) -> str | None:  # type: ignore[override]
        """Return the chip's name in the tables of nxdt; None where there is none, as with the client for the CPU."""
        return product_name()

    def total_memory_bytes(self, device: torch.device | None = None) -> int | None:  # type: ignore[override]
        """Return the memory of a logical core."""
        name = product_name()
        return None if name is None else round(MEMORY_GIB[name] * 2**30)


PROFILE = DeviceProfile(
    device_type="xla",
    process_group_backend="xla",
    operations=LazyDeviceOperations(),
    host_random=True,
    lazy=True,
    static_shapes=True,
    point_to_point=False,
    context_parallel_method="gather",
    peak_flops=PEAK_FLOPS,
    memory_gib=MEMORY_GIB,
    install="torch-xla 2.9 and torch-neuronx 2.9 with torch 2.9",
)
"""Profile of processes that train on this device."""


def lazy_device() -> torch.device:
    """Return this process's device of torch-xla, and let the core know what it is like."""
    import torch_xla

    register_profile(PROFILE)
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
