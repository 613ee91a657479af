"""Settings of a rank's process that follow from the configuration and from what its device has."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.config.schema import RunConfig, TrainerConfig
from nxdt_core.distributed.devices import DeviceProfile, register_profile
from nxdt_core.errors.launch import BadDeviceProfile
from nxdt_core.kernel.plugin import BUILTIN

_KIND = "device"


def register_profile_of(config: ResolvedConfig) -> None:
    """Register the profile of the device type that ``trainer.accelerator`` names, if a plugin brings it.

    ``auto`` means the accelerator that torch finds. Building an engine does this first.

    Raises:
        AmbiguousComponent: several do, and ``plugins.prefer`` names none of them.
        BadDeviceProfile: what the plugin's record names is not a profile of that type.
    """
    registry, wanted = config.kernel.registry, config.run.trainer.accelerator
    if wanted == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type not in registry.names(_KIND):
            return
        wanted = accelerator.type
    component = registry.get(_KIND, wanted)
    if component.plugin == BUILTIN:
        return
    profile = component.load_target()
    if not isinstance(profile, DeviceProfile) or profile.device_type != wanted:
        raise BadDeviceProfile(
            accelerator=wanted,
            plugin=component.plugin,
            reference=component.record.target,
            found=f"a profile of {profile.device_type!r}" if isinstance(profile, DeviceProfile) else repr(profile),
        )
    register_profile(profile)


_EXPANDABLE = "expandable_segments:True"


def configure_allocator(trainer: TrainerConfig, profile: DeviceProfile) -> None:
    """Set the variable of the device's allocator for this process and those that it starts, unless the user has.

    The allocator reads it when the device is first used, not when torch is imported.
    """
    names = profile.allocator_variables
    if names and trainer.expandable_segments is not False and not any(name in os.environ for name in names):
        os.environ[names[0]] = _EXPANDABLE


def ignored_settings(run: RunConfig, profile: DeviceProfile) -> Iterator[str]:
    """Yield a sentence for each setting that has no effect on the device."""
    trainer = run.trainer
    if run.data.pin_memory and not profile.pinned_host_memory:
        yield f"data.pin_memory has no effect: copies to {profile.device_type} do not gain from pinned memory"
    if trainer.float32_matmul_precision != "highest" and not profile.reduced_float32_matmul:
        yield (
            f"trainer.float32_matmul_precision={trainer.float32_matmul_precision} has no effect: {profile.device_type} "
            "has no shorter format for float32 matrix products"
        )
    wanted, names = trainer.expandable_segments, profile.allocator_variables
    if wanted and not names:
        yield f"trainer.expandable_segments has no effect: the allocator of {profile.device_type} has no such segments"
    elif names and wanted is not None and wanted != any(_EXPANDABLE in os.environ.get(name, "") for name in names):
        named = next((name for name in names if name in os.environ), names[0])
        yield (
            f"trainer.expandable_segments={str(wanted).lower()} has no effect: {named} is set to "
            f"{os.environ.get(named, '')!r} and takes precedence"
        )
