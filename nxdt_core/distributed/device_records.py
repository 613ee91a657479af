"""The device types that the core describes, as components. No torch here."""

from __future__ import annotations

from nxdt_core.api import Component

__all__ = ["DEVICE_PROFILES"]

_TABLE = "nxdt_core.distributed.devices"

DEVICE_PROFILES = (
    Component(name="cpu", target=f"{_TABLE}:CPU", summary="the host"),
    Component(name="cuda", target=f"{_TABLE}:CUDA", summary="GPUs of NVIDIA"),
    Component(name="neuron", target=f"{_TABLE}:NEURON", summary="AWS Trainium under torch-neuronx"),
)
