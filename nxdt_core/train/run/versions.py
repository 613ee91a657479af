"""The versions of what a run is made of, for its checkpoints."""

from __future__ import annotations

import torch

from nxdt_core._version import __version__
from nxdt_core.kernel import Kernel

__all__ = ["versions_of"]


def versions_of(kernel: Kernel) -> dict[str, str]:
    """Version by distribution: nxdt-core, torch, and those of the usable plugins."""
    plugins = {plugin.dist: plugin.version for plugin in kernel.plugins if plugin.state == "ok" and plugin.version}
    return {"nxdt-core": __version__, "torch": str(torch.__version__), **plugins}
