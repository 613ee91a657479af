"""Settings of a rank's process that follow from the configuration and from what its device has."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nxdt_core.config.schema.trainer import TrainerConfig
from nxdt_core.devices import DeviceProfile

__all__ = ["ignored_settings", "use_device_settings"]


def use_device_settings(trainer: TrainerConfig, profile: DeviceProfile) -> None:
    """Set what this process computes with, before anything is on the device."""
    if profile.reduced_float32_matmul:
        torch.set_float32_matmul_precision(trainer.float32_matmul_precision)


def ignored_settings(trainer: TrainerConfig, profile: DeviceProfile) -> Iterator[str]:
    """Yield a sentence for each setting that the device does not have."""
    if trainer.float32_matmul_precision != "highest" and not profile.reduced_float32_matmul:
        yield (
            f"trainer.float32_matmul_precision={trainer.float32_matmul_precision} has no effect: {profile.device_type} "
            "has no shorter format for float32 matrix products"
        )
