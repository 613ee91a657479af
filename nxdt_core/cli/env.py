"""``nxdt env``: devices, versions, drivers and backends of this machine, and whether it can run a configuration."""

from __future__ import annotations

import csv
import platform
import re
import shutil
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.terminal import human_size, print_facts, print_table
from nxdt_core.cli.verb import as_json, attributes, optional_config_arguments, print_json, say, verb
from nxdt_core.config import ResolvedConfig, load
from nxdt_core.config.show import hide_secrets
from nxdt_core.distributed.process_group import check_devices
from nxdt_core.errors import NxdtError
from nxdt_core.kernel import Kernel
from nxdt_core.kernel.lock import digest_plugin

if TYPE_CHECKING:
    from nxdt_core.distributed.devices import DeviceProfile

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


@verb("nxdt env", "nxdt env my_run.yaml trainer.devices=8", "nxdt env recipe:llama3-8b-trn2 --json")
@optional_config_arguments
@as_json
@click.pass_context
def env(ctx: click.Context, source: str | None, overrides: tuple[str, ...], json_output: bool) -> None:
    """Show what this machine has: devices, versions of packages, drivers, compilers, plugins with their digests.

    The output is made for bug reports: it has no configuration, no environment variables and no secrets.

    With CONFIG it also says whether one node of that run could start here, and what is missing. Nothing is
    started or changed. Exit status 1 where the run could not start, or a package cannot be used.
    """
    from nxdt_core.distributed.devices import PROFILES, available_type

    config = None if source is None else load(source, overrides)
    kernel = Kernel.start() if config is None else config.kernel
    problems = [] if config is None else [*map(hide_secrets, problems_of_run(config))]
    packages = {name: _package(name) for name in _PACKAGES}
    devices = [_device(profile) for profile in PROFILES.values()]
    drivers = {name: _first_line(file) for name, file in _DRIVERS.items() if file.exists()}
    compilers = {name: path for name in _COMPILERS if (path := shutil.which(name)) is not None}
    facts = {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "auto": available_type(),  # what ``trainer.accelerator=auto`` takes
    }
    plugins = [  # one that is not used has no digest
        {
            **attributes(plugin, "name", "dist", "version", "state"),
            "digest": digest_plugin(plugin) if plugin.state == "ok" else None,
        }
        for plugin in kernel.plugins
    ]
    if json_output:
        run = None if source is None else {"config": source, "can_start": not problems, "problems": problems}
        rows = [{"name": name, "version": version, "problem": text} for name, (version, text) in packages.items()]
        machine = {**facts, "devices": devices, "packages": rows, "drivers": drivers, "compilers": compilers}
        print_json({**machine, "run": run, "plugins": plugins, "fingerprint": kernel.fingerprint()})
    else:
        installed = [(name, f"{version}  {text}".rstrip()) for name, (version, text) in packages.items() if version]
        shown = [*facts.items(), *installed, *drivers.items(), *compilers.items(), ("plugins", kernel.fingerprint())]
        print_facts(shown)
        say("")
        table = []
        for device in devices:
            here = "no" if not device["available"] else "yes" if device["count"] is None else str(device["count"])
            memory = "" if device["memory_bytes"] is None else human_size(device["memory_bytes"])
            backend = f"{device['process_group_backend']}{'' if device['backend_available'] else ' (missing)'}"
            shapes = "fixed" if device["static_shapes"] else "any"
            table.append(
                (device["type"], here, device["name"] or "", memory, backend, device["compile_backend"], shapes)
            )
        header = ("DEVICE", "HERE", "NAME", "MEMORY", "PROCESS GROUPS", "COMPILER", "SHAPES")
        print_table(header, table, optional=("SHAPES", "COMPILER"))
        say("")
        cells = [tuple(value or "-" for value in plugin.values()) for plugin in plugins]
        print_table(("PLUGIN", "DIST", "VERSION", "STATE", "DIGEST"), cells, optional=("DIST",))
        if source is not None:
            say("")
            say(f"{source}: {'cannot start here' if problems else 'can start here'}")
            for problem in problems:
                say(f"  {problem}")
    ctx.exit(1 if problems or any(text for _, text in packages.values()) else 0)


def problems_of_run(config: ResolvedConfig) -> Iterator[str]:
    """Yield what keeps this machine from running one node of ``config``, with what to do about it.

    ``config`` is checked already: that its engine has what it asks for.
    """
    from nxdt_core.distributed.devices import PROFILES, current_device, register_profile_of

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
    for name in () if profile.host else _PAIRED_WITH_TORCH:
        version, problem = _package(name)
        if problem:
            yield f"{name} {version}: {problem}"


def _device(profile: DeviceProfile) -> dict[str, Any]:
    """Return a device type in ``--json``; the count is None for the host, and where there is none."""
    import torch

    operations, kind = profile.operations, profile.device_type
    available = operations.is_available(kind)
    counted = available and not profile.host
    device = torch.device(kind) if available else None
    return {
        "type": kind,
        "available": available,
        "count": operations.count() if counted else None,
        "name": operations.name(device) if device is not None else None,
        "memory_bytes": operations.total_memory_bytes(device) if counted else None,
        "process_group_backend": profile.process_group_backend,
        "backend_available": _has_backend(profile),
        "compile_backend": profile.compile_backend,
        "static_shapes": profile.static_shapes,
    }


def _has_backend(profile: DeviceProfile) -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_backend_available(profile.process_group_backend)


def _package(name: str) -> tuple[str | None, str]:
    """Return the installed version of a package, None where there is none, and why it cannot be used, with what to do;
    empty where nothing is known against it."""
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        return None, ""
    # Modules of a placeholder say that the package is the wrong one; none is imported.
    record = installed.read_text("RECORD") or ""  # ``files`` would make a path of each, 12,000 of torch
    files = (row[0] for row in csv.reader(record.splitlines()) if row)
    modules = (Path(str(installed.locate_file(file))) for file in files if file.endswith(".py") and file.count("/") < 2)
    problem = ""
    if any(_PLACEHOLDER.search(module.read_bytes()) for module in modules if module.is_file()):
        problem = f"PyPI's package only reserves the name. Install it from AWS: pip install {name} -i {_AWS_INDEX}."
    elif name in _PAIRED_WITH_TORCH:
        import torch

        built_for, here = (".".join(version.split(".")[:2]) for version in (installed.version, str(torch.__version__)))
        if built_for != here:
            problem = (
                f"it is for torch {built_for}, and torch is {torch.__version__}. "
                f"Install {name}=={here}.* or that torch."
            )
    return installed.version, problem


def _first_line(file: Path) -> str:
    try:
        return file.read_text().partition("\n")[0].strip()
    except OSError as error:
        return f"not readable: {error.strerror}"
