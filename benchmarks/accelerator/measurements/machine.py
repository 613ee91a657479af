"""What the stages run on, and whether nxdt and its plugins load there."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from accelerator.bench import GIB, Bench
from accelerator.bundle import COMMIT

__all__ = ["changed_files", "describe"]

_LIBRARIES = (
    "torch",
    "triton",
    "transformers",
    "torchao",
    "bitsandbytes",
    "pytorch-lightning",
    "peft",
    "litgpt",
    "torchtitan",
)


def describe(bench: Bench) -> None:
    """Rows of the device, of the libraries and of nxdt."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        bench.row("device", accelerator=None, name=platform.processor() or platform.machine(), cores=os.cpu_count())
    else:
        module = torch.get_device_module(device)
        memory = module.get_device_properties(module.current_device()).total_memory
        bench.row(
            "device",
            accelerator=device.type,
            name=module.get_device_name(),
            count=torch.accelerator.device_count(),
            memory_gib=memory / GIB,
            cores=os.cpu_count(),
            driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        )
    with bench.part("libraries"):
        found = {
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        }
        bench.row("libraries", **found, **{name: _version(name) for name in _LIBRARIES})
    with bench.part("nxdt"):
        import nxdt_core
        from nxdt_core.kernel import Kernel

        bundled = Path(nxdt_core.__file__).parents[1] / COMMIT
        if bundled.exists():
            commit = bundled.read_text(encoding="utf-8").strip()
        else:
            root = str(Path(__file__).parents[3])
            commit = _output("git", "-C", root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        plugins = [f"{plugin.name} {plugin.state}" for plugin in Kernel.start().plugins]
        bench.row(
            "nxdt",
            version=nxdt_core.__version__,
            commit=commit,
            changed=", ".join(changed_files()) or None,
            plugins=", ".join(plugins),
        )


def changed_files() -> Iterator[str]:
    """Yield the modules of installed nxdt distributions that differ from those of their wheels, or are missing."""
    for dist in metadata.distributions():
        record = dist.read_text("RECORD") if (dist.name or "").startswith("nxdt") else None
        for name, digest, _ in csv.reader((record or "").splitlines()):  # dist.files lacks missing ones in Python 3.12
            algorithm, _, value = digest.partition("=")
            if not name.endswith(".py") or not value:
                continue
            path = Path(str(dist.locate_file(name)))
            if not path.exists() or _digest(path, algorithm) != value:
                yield name


def _digest(path: Path, algorithm: str) -> str:
    digest = hashlib.new(algorithm, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _output(*command: str) -> str | None:
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
