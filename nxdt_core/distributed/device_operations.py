"""Operations of a device type at run time: its devices, their memory, their random numbers.

:class:`DeviceOperations` asks ``torch.accelerator`` and the module ``torch.<type>``, as devices provide them that
torch knows, PrivateUse1 devices among them. A device profile names another class where its library does otherwise, such
as :class:`TrainiumOperations`, with the facts about AWS's chips.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from nxdt_core.distributed.torch_versions import memory_info

_T = TypeVar("_T")


_TERA = 1e12
_LNC = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
"""Variables with the number of physical cores in a logical one; the second is the runtime's older name."""
_SYSTEM = Path("/sys")
_NAMING_FILES = (
    "devices/virtual/neuron_device/neuron0/info/architecture/instance_type",
    "class/neuron_device/neuron0/info/architecture/instance_type",
    "devices/virtual/dmi/id/product_name",
)
"""Files below ``/sys`` that name the type of chip or of EC2 instance, such as ``trn2.48xlarge``."""
PEAK_FLOPS: dict[str, dict[str, float]] = {}
"""Name → dtype → dense FLOP/s of one process; for :attr:`nxdt_core.distributed.devices.DeviceProfile.peak_flops`."""
MEMORY_GIB: dict[str, float] = {}
"""Name → memory of one process in GiB."""


class DeviceOperations:
    """Operations of an accelerator; a plugin's profile subclasses this and replaces what its device does otherwise.

    Figures (a name, sizes of memory) are None where the device has none: no run needs them.
    """

    def is_available(self, device_type: str) -> bool:
        """Return whether this machine has such a device."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator is not None and accelerator.type == device_type

    def count(self) -> int:
        """Return the number of devices of this machine; each process of a run uses one."""
        return int(torch.accelerator.device_count())

    def current_index(self) -> int | None:
        """Return the number of the device that this process uses; None for a type without numbers."""
        return int(torch.accelerator.current_device_index())

    def set_index(self, index: int) -> None:
        """Let this process use the device of that number."""
        torch.accelerator.set_device_index(index)

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done what it was given."""
        torch.accelerator.synchronize(device)

    def recorded(self, run: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Return what launches the kernels of ``run`` again, all at once and on the same memory. They do not run now.

        Raises:
            RuntimeError: ``run`` does what cannot be recorded, such as wait for the device.
        """
        module = torch.get_device_module(device)
        graph = module.CUDAGraph()
        # Other threads may use the device, too. A recording that fails leaves its stream the current one (torch 2.13).
        with module.stream(module.current_stream(device)), module.graph(graph, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    def seed(self, seed: int) -> None:
        """Seed the device's generator, if ``torch.manual_seed`` does not."""

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """Return the state of the device's generator; None where it has none."""
        state: torch.Tensor = torch.get_device_module(device).get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Restore what :meth:`rng_state` returned."""
        torch.get_device_module(device).set_rng_state(state)

    def name(self, device: torch.device) -> str | None:
        """Return the product name of the device, in which a profile's figures are looked up."""
        return _figure(lambda: str(torch.get_device_module(device).get_device_name(device)))

    def generation(self, device: torch.device) -> int | None:
        """Return the major compute capability of the device; None where its type has none."""
        return _figure(lambda: int(torch.get_device_module(device).get_device_capability(device)[0]))

    def total_memory_bytes(self, device: torch.device | None = None) -> int | None:
        """Return the size of a device's memory; ``device`` is the current one by default."""
        return _figure(lambda: memory_info(device)[1])

    def max_memory_bytes(self, device: torch.device) -> int | None:
        """Return the most bytes that tensors had taken since :meth:`reset_max_memory`."""
        return _figure(lambda: int(torch.accelerator.max_memory_allocated(device)))

    def reset_max_memory(self, device: torch.device) -> None:
        """Start counting :meth:`max_memory_bytes` again."""
        _figure(lambda: torch.accelerator.reset_peak_memory_stats(device))


class HostOperations(DeviceOperations):
    """Operations on host memory, which has no numbered devices and no second random-number generator."""

    def is_available(self, device_type: str) -> bool:
        """Return True."""
        return True

    def _nothing(self, *arguments: Any) -> None:
        """Do nothing: the host has no number, waits for each operation, has torch's own generator, and shares its
        memory with other processes. No figures depend on its name, and its kernel keeps one high-water mark of memory
        for the process's life."""

    current_index = set_index = synchronize = rng_state = set_rng_state = _nothing  # type: ignore[assignment]
    name = total_memory_bytes = reset_max_memory = _nothing  # type: ignore[assignment]

    def max_memory_bytes(self, device: torch.device) -> int:
        """Return the largest resident set of the process."""
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class UnknownDeviceOperations(HostOperations):
    """Operations of a type that no profile describes: nothing is asked of it, so that an engine can use it anyway."""

    def is_available(self, device_type: str) -> bool:
        """Return False."""
        return False

    max_memory_bytes = HostOperations._nothing  # type: ignore[assignment]


def _figure(ask: Callable[[], _T]) -> _T | None:
    """Return what ``ask`` returns; None from a device that does not implement it, which must not end a run."""
    try:
        return ask()
    except (
        RuntimeError,
        AttributeError,
        NotImplementedError,
        ValueError,
    ):  # ValueError: torch is built for another type
        return None


# Dense figures of AWS's architecture pages, November 2026 (awsdocs-neuron.readthedocs-hosted.com,
# about-neuron/arch/neuron-hardware/trainium, trainium2, trainium3): bfloat16 and float32 TFLOP/s and GiB of a chip. A
# process uses one logical core, of which a chip has several. On Trainium2 and 3 the runtime combines two physical cores
# into a logical one (LNC 2) unless NEURON_LOGICAL_NC_CONFIG says otherwise: a trn2.48xlarge of 16 chips has 64 logical
# cores of 24 GiB. The plain name is that of the default.
for _name, _cores, _default_lnc, _bfloat16, _float32, _gib in (
    ("trn1", 2, 1, 190, 47.5, 32),
    ("trn2", 8, 2, 667, 181, 96),
    ("trn3", 8, 2, 671, 183, 144),
):
    for _process, _lnc in (
        (_name, _default_lnc),
        (f"{_name}-lnc1", 1),
        (f"{_name}-lnc{_default_lnc}", _default_lnc),
    ):
        _share = _lnc / _cores
        PEAK_FLOPS[_process] = {"float32": _float32 * _TERA * _share, "bfloat16": _bfloat16 * _TERA * _share}
        MEMORY_GIB[_process] = _gib * _share


def product_name(system: Path = _SYSTEM) -> str | None:
    """Return what this machine's chips are called in the tables, such as ``trn2-lnc2``; None if it has none.

    Args:
        system: where the kernel's files are.
    """
    for file in _NAMING_FILES:
        try:
            match = re.search(r"trn\d", (system / file).read_text())
        except OSError:
            continue
        if match is not None:
            lnc = next((value for name in _LNC if (value := os.environ.get(name))), None)
            named = f"{match[0]}-lnc{lnc}"
            return named if named in MEMORY_GIB else match[0]
    return None


class TrainiumOperations(DeviceOperations):
    """Operations of torch-neuronx, a PrivateUse1 device, and what the driver says of the chip."""

    def name(self, device: torch.device) -> str | None:
        """Return the name of the chip in the tables, or what torch calls it."""
        return product_name() or super().name(device)

    def total_memory_bytes(self, device: torch.device | None = None) -> int | None:
        """Return the memory of a logical core: as torch says, or the chip's share."""
        reported = super().total_memory_bytes(device)
        if reported is not None:
            return reported
        name = product_name()
        return None if name is None else round(MEMORY_GIB[name] * 2**30)
