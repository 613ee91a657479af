"""Errors of devices, layouts and launch: codes ``NXDT-P…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing

__all__ = [
    "AcceleratorMissing",
    "UnknownAccelerator",
    "WorldDoesNotDivide",
]


class UnknownAccelerator(NxdtError):
    """A device type that no profile describes."""

    code = "NXDT-P001"
    happened = "trainer.accelerator names no device type: {accelerator!r}."
    remedy = "Write one of {names}, or auto."
    accelerator: str
    known: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "names": listing(self.known)}


class AcceleratorMissing(NxdtError):
    """A device type that this machine, or this build of torch, does not have."""

    code = "NXDT-P002"
    happened = "trainer.accelerator is {accelerator!r}, and torch finds only {found!r} here."
    remedy = "Install the build of torch for that device and its driver, or set trainer.accelerator=auto."
    accelerator: str
    found: str


class WorldDoesNotDivide(NxdtError):
    """A number of processes that does not fill whole copies of the model."""

    code = "NXDT-P003"
    happened = (
        "{world_size} processes do not divide into groups of TP {tp} x PP {pp} x CP {cp}, with dp_replicate {dp_replicate} "
        "dividing what is left and EP {ep} dividing a replica's data and context parallel ranks."
    )
    remedy = "Change trainer.devices x trainer.num_nodes or the sizes of distributed_strategy."
    world_size: int
    tp: int
    pp: int
    cp: int
    dp_replicate: int
    ep: int
