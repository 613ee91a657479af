"""Importing this module imports all of the core and what its training takes of other packages.

A server that forks the processes of tests imports it once (:mod:`nxdt_core.testing.ranks`): for a process of its own
that is 8 CPU-seconds, which is more than most of them work.
"""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress

import nxdt_core

__all__: list[str] = []

_THIRD_PARTY = (
    "boto3",  # where it is installed
    "omegaconf",
    "pytorch_lightning",  # 5 CPU-seconds, more than torch
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
)
_LEFT_OUT = ("nxdt_core.__main__", "nxdt_core.config.marks", "nxdt_core.testing")


def _import_all() -> None:
    names = [each.name for each in pkgutil.walk_packages(nxdt_core.__path__, "nxdt_core.")]
    for name in (*_THIRD_PARTY, *(name for name in names if not name.startswith(_LEFT_OUT))):
        with suppress(ImportError):  # of what is not installed
            importlib.import_module(name)


_import_all()
