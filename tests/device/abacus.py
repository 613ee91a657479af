"""Loads the device type of ``abacus.cpp`` into this process, when it is imported, and describes it to nxdt."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch._dynamo import register_backend

from nxdt_core.device_operations import DeviceOperations
from nxdt_core.devices import DeviceProfile
from tests.device.building import CACHE, library

__all__ = ["COMPILED", "NAME", "PROFILE", "waits"]

NAME = "abacus"

COMPILED: list[str] = []
"""Device types of the inputs of each graph that was compiled."""


def waits() -> int:
    """How often this process has read a value of the device so far."""
    return int(torch.ops.abacus.waits())


class _Module:
    """What torch finds as ``torch.abacus``: the least that a device has to have."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def current_device() -> int:
        return torch.accelerator.current_device_index()

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16]


class _Operations(DeviceOperations):
    """It has no generator."""

    def rng_state(self, device: torch.device) -> None:
        """Return None."""

    def name(self, device: torch.device) -> str:
        """Return the name of the product."""
        return "Abacus 2"


torch.ops.load_library(str(library(Path(os.environ[CACHE]))))
torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _Module)
torch.utils.generate_methods_for_privateuse1_backend()


@register_backend(name=NAME)
def _compile(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
    """Run a graph as it is, and count it."""
    COMPILED.append(next(each.device.type for each in inputs if isinstance(each, torch.Tensor)))
    return graph.forward


PROFILE = DeviceProfile(
    device_type=NAME,
    process_group_backend="gloo",
    operations=_Operations(),
    host_random=True,
    static_shapes=True,
    point_to_point=False,
    context_parallel_method="gather",
    compile_backend=NAME,
    peak_flops={"Abacus": {"float32": 1e12}},
)
"""As of an accelerator that compiles for fixed shapes."""
