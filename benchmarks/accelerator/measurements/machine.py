"""What the stages run on, and whether nxdt and its plugins load there."""

from __future__ import annotations

import os
import platform

from accelerator.bench import GIB, Bench

__all__ = ["describe"]

_LIBRARIES = ("torch", "triton", "transformers", "pytorch_lightning", "peft", "omegaconf", "litgpt", "torchtitan")


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
        )
    with bench.part("libraries"):
        bench.row("libraries", python=platform.python_version(), **{name: _version(name) for name in _LIBRARIES})
    with bench.part("nxdt"):
        from nxdt_core import __version__
        from nxdt_core.kernel import Kernel

        plugins = [f"{plugin.name} {plugin.state}" for plugin in Kernel.start().plugins]
        bench.row("nxdt", version=__version__, plugins=", ".join(plugins))


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return None
