"""What a process has of a Trainium chip, and how the chip is recognised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nxdt_core.distributed.device_operations import MEMORY_GIB, PEAK_FLOPS, TrainiumOperations, product_name
from nxdt_core.distributed.devices import NEURON

LNC = "NEURON_LOGICAL_NC_CONFIG"


@pytest.mark.parametrize(
    ("name", "processes", "bfloat16", "memory_gib"),
    [
        ("trn1", 2, 190e12, 32),
        ("trn2", 4, 667e12, 96),
        ("trn2-lnc1", 8, 667e12, 96),
        ("trn2-lnc2", 4, 667e12, 96),
        ("trn3", 4, 671e12, 144),
    ],
)
def test_the_processes_of_a_chip_have_together_what_it_has(
    name: str, processes: int, bfloat16: float, memory_gib: float
) -> None:
    assert PEAK_FLOPS[name]["bfloat16"] * processes == pytest.approx(bfloat16)
    assert MEMORY_GIB[name] * processes == pytest.approx(memory_gib)
    assert PEAK_FLOPS[name]["float32"] < PEAK_FLOPS[name]["bfloat16"]


def machine(root: Path, file: str, text: str) -> Path:
    """A directory like ``/sys`` with one file."""
    path = root / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("file", "text", "lnc", "expected"),
    [
        ("devices/virtual/dmi/id/product_name", "trn2.48xlarge\n", None, "trn2"),
        ("devices/virtual/dmi/id/product_name", "trn2u.48xlarge\n", "1", "trn2-lnc1"),
        ("devices/virtual/dmi/id/product_name", "trn3.48xlarge\n", "2", "trn3-lnc2"),
        ("devices/virtual/dmi/id/product_name", "trn2.48xlarge\n", "7", "trn2"),
        ("devices/virtual/neuron_device/neuron0/info/architecture/instance_type", "trn1\n", None, "trn1"),
        ("devices/virtual/dmi/id/product_name", "p5.48xlarge\n", None, None),
    ],
)
def test_a_chip_is_recognised_by_what_the_kernel_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, lnc: str | None, expected: str | None
) -> None:
    monkeypatch.delenv("NEURON_RT_VIRTUAL_CORE_SIZE", raising=False)
    monkeypatch.delenv(LNC, raising=False)
    if lnc is not None:
        monkeypatch.setenv(LNC, lnc)
    assert product_name(machine(tmp_path, file, text)) == expected


def test_a_machine_without_chips_has_no_name(tmp_path: Path) -> None:
    assert product_name(tmp_path) is None
    operations = TrainiumOperations()
    assert not operations.is_available("neuron")
    assert operations.total_memory_bytes(torch.device("meta")) is None


def test_a_torch_that_is_built_for_another_device_says_nothing_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("meta doesn't match the current accelerator cuda.")

    monkeypatch.setattr("nxdt_core.distributed.device_operations.memory_info", refuse)
    assert TrainiumOperations().total_memory_bytes(torch.device("meta")) is None


def test_the_profile_compiles_for_fixed_shapes_and_never_waits() -> None:
    assert NEURON.never_waits
    assert NEURON.compile_backend == "neuron"
    assert NEURON.memory_gib.keys() == NEURON.peak_flops.keys()
