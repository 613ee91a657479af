"""Lightning's accelerator for a device type that Lightning does not know."""

from __future__ import annotations

from typing import Any, final

import torch
from pytorch_lightning.accelerators import Accelerator

from nxdt_core.distributed.devices import profile_of


@final
class EngineAccelerator(Accelerator):
    """The device of a parallel engine, which has chosen it; Lightning decides nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def setup_device(self, device: torch.device) -> None:
        """Let the process use the device."""
        if device.index is not None:
            profile_of(device).operations.set_index(device.index)

    def teardown(self) -> None:
        """Do nothing: the engine leaves its device."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return the highest memory use, for Lightning's ``DeviceStatsMonitor``."""
        peak = profile_of(self._device).operations.max_memory_bytes(self._device)
        return {} if peak is None else {"max_memory_bytes": peak}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Return ``devices``: a process has one."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return nothing: the strategy has the engine's device."""
        return []

    @staticmethod
    def auto_device_count() -> int:
        """Return 1: each process has one device."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Return True: the engine has refused a device that is not there."""
        return True

    @staticmethod
    def name() -> str:
        """Return the name that Lightning logs."""
        return "engine"
