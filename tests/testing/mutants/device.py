"""Wrong device profiles, each with one mistake that a real author could make, under the contract.

They are of the CPU, so that their operations run. Not collected by name: ``test_device_mutants.py`` runs this
file and expects failures.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nxdt_testing.device_contract import DeviceContract

from nxdt_core.distributed.device_operations import HostOperations, UnknownDeviceOperations
from nxdt_core.distributed.devices import DeviceProfile, Links


class Operations(HostOperations):
    """As of a device with a generator."""

    def rng_state(self, device):
        return torch.get_rng_state()

    def set_rng_state(self, state, device):
        torch.set_rng_state(state)


class KeepsItsState(Operations):
    def set_rng_state(self, state, device):
        pass


class FailsWithoutADevice(Operations):
    def is_available(self, device_type):
        raise RuntimeError("no driver")


class SaysHowMany(Operations):
    def is_available(self, device_type):
        return 1


class CountsInGiB(Operations):
    def total_memory_bytes(self, device=None):
        return 15.5


RIGHT = DeviceProfile(
    device_type="cpu",
    process_group_backend="gloo",
    operations=Operations(),
    peak_flops={"Mine": {"bfloat16": 1e14}},
    memory_gib={"Mine": 32},
    links={"Mine": Links(processes=8, inside=1e11, outside=1e10)},
    block_attention=("bfloat16",),
)
MUTANTS = {
    "Right": RIGHT,
    "IsOfAnotherType": replace(RIGHT, device_type="mine", operations=UnknownDeviceOperations()),
    "HasNoBackend": replace(RIGHT, process_group_backend=""),
    "SaysNothingOfInstalling": replace(RIGHT, install=" "),
    "PeakInTeraflops": replace(RIGHT, peak_flops={"Mine": {"bfloat16": 100.0}}),
    "MemoryInBytes": replace(RIGHT, memory_gib={"Mine": 32 * 2**30}),
    "LinksInGigabytes": replace(RIGHT, links={"Mine": Links(processes=8, inside=100, outside=10)}),
    "ShortNameOfADtype": replace(RIGHT, peak_flops={"Mine": {"bf16": 1e14}}),
    "ShortNameOfADtypeInBlocks": replace(RIGHT, block_attention=("fp32",)),
    "AnotherNameOfTheProduct": replace(RIGHT, memory_gib={"mine": 32}),
    "FailsWithoutADevice": replace(RIGHT, operations=FailsWithoutADevice()),
    "SaysHowMany": replace(RIGHT, operations=SaysHowMany()),
    "CountsInGiB": replace(RIGHT, operations=CountsInGiB()),
    "KeepsItsState": replace(RIGHT, operations=KeepsItsState()),
}


def under_contract(made):
    class Contract(DeviceContract):
        name = "cpu"

        @pytest.fixture
        def profile(self):
            return made

    return Contract


for _name, _made in MUTANTS.items():
    globals()[f"Test{_name}"] = under_contract(_made)
