"""Importing this module imports all of the core and the other packages that its training uses.

A server that forks the processes of tests imports it once (:mod:`nxdt_testing.ranks`). In a separate process
the imports take 8 CPU-seconds, which is more than most of the tests' processes work.
"""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress
from importlib import metadata

import nxdt_core
from nxdt_core.config.load import check
from nxdt_core.config.sources import list_recipes
from nxdt_core.kernel import Kernel, PluginPolicy

__all__: list[str] = []

_THIRD_PARTY = (
    "boto3",  # where it is installed
    "omegaconf",
    "packaging.requirements",  # with torch.distributed.tensor.debug, 0.04 CPU-seconds of each rank
    "pytest",  # by the files whose functions ranks run
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
)
_LEFT_OUT = ("nxdt_core.__main__", "nxdt_core.config.marks", "nxdt_testing")


_modules = [module.name for module in pkgutil.walk_packages(nxdt_core.__path__, "nxdt_core.")]


def _prepare_configurations() -> None:
    """Start a kernel with first-party plugins, which import the API alone, and read their recipes for small models.

    So each process has read the metadata of distributions, the annotations of keys and the files of plugins, which
    takes longer than all else that a configuration takes. Plugins of others are imported by each process, since their
    entry modules may do anything.
    """
    names = {dist.name or "" for dist in metadata.distributions()}
    kernel = Kernel.start(PluginPolicy(allow=tuple(name for name in names if name.startswith("nxdt-plugin-"))))
    with suppress(Exception):  # of a plugin with a mistake: the process that uses it reports it
        kernel.fingerprint()
        for recipe in list_recipes(kernel):
            if "tiny" in recipe.name:
                check(f"recipe:{recipe.plugin}:{recipe.name}", kernel=kernel)


for _name in (*_THIRD_PARTY, *(name for name in _modules if not name.startswith(_LEFT_OUT))):
    with suppress(ImportError):  # of what is not installed
        importlib.import_module(_name)
_prepare_configurations()
