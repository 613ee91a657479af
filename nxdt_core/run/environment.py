"""Report of ``nxdt env``: devices and packages for training on this machine, and whether it can run a configuration."""

from __future__ import annotations

import csv
import platform
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.device_settings import register_profile_of
from nxdt_core.distributed.devices import PROFILES, DeviceProfile, available_type, current_device
from nxdt_core.distributed.process_group import check_devices
from nxdt_core.errors import NxdtError

_PACKAGES = (
    *("torch", "torch-neuronx", "torch-xla", "neuronx-distributed", "libneuronxla", "neuronx-cc", "nki"),
    *("pytorch-lightning", "numpy", "safetensors", "transformers", "tokenizers", "triton"),
)
_PAIRED_WITH_TORCH = ("torch-neuronx", "torch-xla")
"""Packages whose first two numbers are those of the version of torch that they were built for."""
_PLACEHOLDER = re.compile(rb"wrong package", re.IGNORECASE)
"""Message of the placeholder modules under names that AWS has only reserved on PyPI."""
_AWS_INDEX = "https://pip.repos.neuron.amazonaws.com"
_DRIVERS = {
    "nvidia": Path("/proc/driver/nvidia/version"),
    "neuron driver": Path("/sys/module/neuron/version"),
    "efa": Path("/sys/module/efa/version"),
}
_COMPILERS = ("g++", "clang++", "ninja", "neuronx-cc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that decides what can run."""

    name: str
    version: str | None
    """Installed version; None where it is not installed."""
    problem: str = ""
    """Reason why it cannot be used, with what to do; empty where nothing is known against it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device type that a profile describes."""

    type: str
    available: bool
    count: int | None
    """Number of devices; None for the host, and where there is none."""
    name: str | None
    memory_bytes: int | None
    """Memory of one device."""
    process_group_backend: str
    backend_available: bool
    compile_backend: str
    static_shapes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """This machine and its software."""

    host: str
    system: str
    python: str
    auto: str
    """Device type that ``trainer.accelerator=auto`` takes."""
    devices: tuple[Device, ...]
    packages: tuple[Package, ...]
    drivers: dict[str, str]
    compilers: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON-able tree."""
        return asdict(self)


def environment() -> Environment:
    """Look at this machine; changes nothing and starts nothing."""
    return Environment(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        auto=available_type(),
        devices=tuple(_device(profile) for profile in PROFILES.values()),
        packages=tuple(_package(name) for name in _PACKAGES),
        drivers={name: _first_line(file) for name, file in _DRIVERS.items() if file.exists()},
        compilers={name: path for name in _COMPILERS if (path := shutil.which(name)) is not None},
    )


def problems_of_run(config: ResolvedConfig) -> Iterator[str]:
    """Yield what keeps this machine from running one node of ``config``, with what to do about it.

    ``config`` is checked already: that its engine has what it asks for.
    """
    try:
        register_profile_of(config)
        device = current_device(config.run.trainer.accelerator)
        check_devices(device, config.run.trainer.devices, socket.gethostname())
    except NxdtError as error:
        yield str(error)
        return
    profile = PROFILES[device.type]
    if config.run.trainer.devices * config.run.trainer.num_nodes > 1 and not _has_backend(profile):
        yield (
            f"torch has no process-group backend {profile.process_group_backend!r}, which ranks on {device.type} need. "
            f"Install {profile.install}."
        )
    if config.run.model.compile:
        from torch._dynamo import list_backends  # seconds: only a run that compiles pays for it

        has_compiler = any(shutil.which(name) for name in ("g++", "clang++"))  # for kernels of the host
        if profile.compile_backend not in list_backends(exclude_tags=()) or (profile.host and not has_compiler):
            yield (
                f"torch.compile cannot use its backend {profile.compile_backend!r} here. Install a C++ compiler, or"
                " set model.compile=false."
            )
    for package in map(_package, _PACKAGES):
        if package.problem and package.name in _PAIRED_WITH_TORCH and not profile.host:
            yield f"{package.name} {package.version}: {package.problem}"


def _device(profile: DeviceProfile) -> Device:
    operations, kind = profile.operations, profile.device_type
    available = operations.is_available(kind)
    device = torch.device(kind) if available else None
    counted = available and not profile.host
    return Device(
        type=kind,
        available=available,
        count=operations.count() if counted else None,
        name=operations.name(device) if device is not None else None,
        memory_bytes=operations.total_memory_bytes(device) if counted else None,
        process_group_backend=profile.process_group_backend,
        backend_available=_has_backend(profile),
        compile_backend=profile.compile_backend,
        static_shapes=profile.static_shapes,
    )


def _has_backend(profile: DeviceProfile) -> bool:
    return dist.is_available() and dist.is_backend_available(profile.process_group_backend)


def _package(name: str) -> Package:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return Package(name=name, version=None)
    # Modules of a placeholder say that the package is the wrong one; none is imported.
    record = found.read_text("RECORD") or ""  # ``files`` would make a path of each, 12,000 of torch
    files = (row[0] for row in csv.reader(record.splitlines()) if row)
    modules = (Path(str(found.locate_file(file))) for file in files if file.endswith(".py") and file.count("/") <= 1)
    problem = ""
    if any(_PLACEHOLDER.search(module.read_bytes()) for module in modules if module.is_file()):
        problem = f"PyPI's package only reserves the name. Install it from AWS: pip install {name} -i {_AWS_INDEX}."
    elif name in _PAIRED_WITH_TORCH and _pair(found.version) != _pair(torch.__version__):
        problem = (
            f"it is for torch {'.'.join(_pair(found.version))}, and torch is {torch.__version__}. "
            f"Install {name}=={'.'.join(_pair(torch.__version__))}.* or that torch."
        )
    return Package(name=name, version=found.version, problem=problem)


def _pair(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def _first_line(file: Path) -> str:
    try:
        return file.read_text().partition("\n")[0].strip()
    except OSError as error:
        return f"not readable: {error.strerror}"
