"""Which device profile a run uses: that of the installed plugin that describes its device type."""

from __future__ import annotations

import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import DeviceProfile, register_profile
from nxdt_core.errors.launch import BadDeviceProfile, UnknownAccelerator
from nxdt_core.kernel.plugin import BUILTIN

__all__ = ["register_profile_of"]

_KIND = "device"


def register_profile_of(config: ResolvedConfig) -> None:
    """Register the profile of the device type that ``trainer.accelerator`` names, if a plugin brings it.

    ``auto`` means the accelerator that torch finds. Building an engine does this first.

    Raises:
        UnknownAccelerator: no installed plugin describes the type.
        AmbiguousComponent: several do, and ``plugins.prefer`` names none of them.
        BadDeviceProfile: what the plugin's record names is not a profile of that type.
    """
    registry, wanted = config.kernel.registry, config.run.trainer.accelerator
    known = registry.names(_KIND)
    if wanted == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type not in known:
            return
        wanted = found.type
    if wanted not in known:
        raise UnknownAccelerator(accelerator=wanted, known=known)
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
