"""Stand-ins for the closed packages that neuronx-distributed imports: what its imports need, and nothing more.

The library imports kernels and tracing with everything else, so that these names must exist although its CPU mode
calls none of them. Any submodule and any attribute of a package here is a :class:`Placeholder`, which does nothing.
What the library does call has a real implementation in :data:`REAL`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType


class Placeholder:
    """Something that can be imported, subclassed, subscripted and used as a decorator, and that computes nothing."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        decorated = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorated else self

    def __getitem__(self, key):
        return self

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases):
        return ()


class CollectivesConfig:
    """Rings of ranks: each sends to the next one of its group."""

    def __init__(self, replica_groups):
        self.rank_src_tgt_pairs = {
            rank: [[source, target] for source, target in zip(group, [*group[1:], group[0]], strict=True)]
            for group in replica_groups
            for rank in group
        }


def get_platform_target():
    """Return the device generation; ranks of trn2 are tensor parallel neighbours for every size."""
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")


REAL = {
    "neuronxcc.nki._pre_prod_kernels.collectives": {"CollectivesConfig": CollectivesConfig},
    "torch_neuronx.utils": {"get_platform_target": get_platform_target},
    "torch_neuronx.utils.utils": {"get_platform_target": get_platform_target, "SUPPORTED_TYPES": ()},
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of the packages that called :func:`open_up`."""

    def __init__(self):
        self.packages = set()

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in self.packages or "." not in fullname:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        fill(module)


FINDER = Finder()


def open_up(package):
    """Let every submodule and attribute of a top-level package exist."""
    if FINDER not in sys.meta_path:
        sys.meta_path.append(FINDER)
    FINDER.packages.add(package)
    fill(sys.modules[package])


def fill(module: ModuleType) -> None:
    """Give a module its real attributes, and a placeholder for any other."""
    vars(module).update(REAL.get(module.__name__, {}))

    def missing(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{module.__name__}.{name}")

    module.__getattr__ = missing
