"""Facts about AWS Trainium chips, per process: a process uses one logical core, of which a chip has several.

Figures are those of AWS's architecture pages, November 2026, dense, per chip (awsdocs-neuron.readthedocs-hosted.com,
about-neuron/arch/neuron-hardware/trainium, trainium2, trainium3):

==========  ======  ============  ============  ==========
chip        cores   BF16 TFLOP/s  FP32 TFLOP/s  memory GiB
==========  ======  ============  ============  ==========
Trainium    2       190           47.5          32
Trainium2   8       667           181           96
Trainium3   8       671           183           144
==========  ======  ============  ============  ==========

On Trainium2 and 3 the runtime combines two physical cores into a logical one (LNC 2) unless
``NEURON_LOGICAL_NC_CONFIG`` says otherwise: a trn2.48xlarge of 16 chips has 64 logical cores of 24 GiB.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from nxdt_core.distributed.device_operations import DeviceOperations

__all__ = ["MEMORY_GIB", "PEAK_FLOPS", "TrainiumOperations", "product_name"]

_T = 1e12
_LNC = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
"""Variables with the number of physical cores in a logical one; the second is the runtime's older name."""
_SYSTEM = Path("/sys")
_NAMING_FILES = (
    "devices/virtual/neuron_device/neuron0/info/architecture/instance_type",
    "class/neuron_device/neuron0/info/architecture/instance_type",
    "devices/virtual/dmi/id/product_name",
)
"""Files below ``/sys`` that name the type of chip or of EC2 instance, such as ``trn2.48xlarge``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chip:
    name: str
    cores: int
    default_lnc: int
    bfloat16: float
    float32: float
    memory_gib: float

    def per_process(self) -> Iterator[tuple[str, float]]:
        """Names, and the share of the chip that a process of that name has. The plain name is the default LNC."""
        yield self.name, self.default_lnc / self.cores
        for lnc in {1, self.default_lnc}:
            yield f"{self.name}-lnc{lnc}", lnc / self.cores


_CHIPS = (
    _Chip(name="trn1", cores=2, default_lnc=1, bfloat16=190 * _T, float32=47.5 * _T, memory_gib=32),
    _Chip(name="trn2", cores=8, default_lnc=2, bfloat16=667 * _T, float32=181 * _T, memory_gib=96),
    _Chip(name="trn3", cores=8, default_lnc=2, bfloat16=671 * _T, float32=183 * _T, memory_gib=144),
)

PEAK_FLOPS: Mapping[str, Mapping[str, float]] = {
    name: {"float32": chip.float32 * share, "bfloat16": chip.bfloat16 * share}
    for chip in _CHIPS
    for name, share in chip.per_process()
}
"""Name → dtype → dense FLOP/s of one process; for :attr:`nxdt_core.distributed.devices.DeviceProfile.peak_flops`."""

MEMORY_GIB: Mapping[str, float] = {
    name: chip.memory_gib * share for chip in _CHIPS for name, share in chip.per_process()
}
"""Name → memory of one process in GiB."""


def product_name(system: Path = _SYSTEM) -> str | None:
    """Return what this machine's chips are called in the tables, such as ``trn2-lnc2``; None if it has none.

    Args:
        system: where the kernel's files are.
    """
    for file in _NAMING_FILES:
        try:
            found = re.search(r"trn\d", (system / file).read_text())
        except OSError:
            continue
        if found is not None:
            lnc = next((value for name in _LNC if (value := os.environ.get(name))), None)
            named = f"{found[0]}-lnc{lnc}"
            return named if named in MEMORY_GIB else found[0]
    return None


class TrainiumOperations(DeviceOperations):
    """Operations of torch-neuronx, a PrivateUse1 device, and what the driver says of the chip."""

    def name(self, device: torch.device) -> str | None:
        """Return the name of the chip in the tables, or what torch calls it."""
        return product_name() or super().name(device)

    def total_memory_bytes(self, device: torch.device | None = None) -> int | None:
        """Return the memory of a logical core: as torch says, or the chip's share."""
        said = super().total_memory_bytes(device)
        if said is not None:
            return said
        name = product_name()
        return None if name is None else round(MEMORY_GIB[name] * 2**30)
