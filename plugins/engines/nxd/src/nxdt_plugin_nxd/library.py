"""Check that neuronx-distributed can be imported, and the errors if it cannot."""

from __future__ import annotations

import logging
import os
from importlib import import_module, util
from importlib.metadata import PackageNotFoundError, version
from traceback import walk_tb
from types import ModuleType

from nxdt_plugin_nxd.errors import LibraryBroken, LibraryMissing, LibraryPlaceholder, VersionsDoNotFit

CPU_MODE = "NXD_CPU_MODE"
"""The library's own variable: above 0 its layers and its pipeline run on the host, over gloo."""

_PACKAGES = ("torch_xla", "neuronx_distributed")
_PAIRED_WITH_TORCH = ("torch-xla", "torch-neuronx")
"""Packages whose first two numbers are those of the torch that they were built for."""
_PLACEHOLDER = "WRONG PACKAGE"


def computes_on_host() -> bool:
    """Return whether the library runs in its CPU mode."""
    text = os.environ.get(CPU_MODE, "0")
    return text.isdecimal() and int(text) > 0


def platform() -> str:
    """Return the generation of the chips at hand, such as ``trn1``, as the library asks for it."""
    from torch_neuronx.utils import get_platform_target

    return str(get_platform_target())


def load_library() -> ModuleType:
    """Import neuronx-distributed.

    Raises:
        LibraryMissing: it, or torch-xla, is not installed.
        LibraryPlaceholder: one of its packages comes from PyPI.
        VersionsDoNotFit: torch-xla or torch-neuronx was built for another torch.
        LibraryBroken: it fails while it is imported.
    """
    for package in _PACKAGES:
        if util.find_spec(package) is None:
            name = package.replace("_", "-")
            try:
                version(name)
            except PackageNotFoundError:
                raise LibraryMissing(package=name) from None
            raise LibraryPlaceholder(package=name)  # PyPI's of the library has no module of its name
    for name in _PAIRED_WITH_TORCH:
        try:
            torch, installed = version("torch"), version(name)
        except PackageNotFoundError:
            continue  # not installed from wheels; its own import says more
        if torch.split(".")[0] != installed.split(".")[0]:
            continue  # PyPI's placeholders count from 0
        if torch.split(".")[:2] != installed.split(".")[:2]:
            raise VersionsDoNotFit(torch=torch, package=name, version=installed)
    os.environ.setdefault("NXD_LOG_LEVEL", "warning")  # it lists every group of ranks otherwise
    handlers = list(logging.root.handlers)
    # torch-xla first: it looks for the Neuron runtime when it is imported.
    library = [_imported(package) for package in _PACKAGES][-1]
    logging.root.handlers[:] = handlers  # torch-xla adds one, which would print each of a run's lines twice
    return library


def _imported(package: str) -> ModuleType:
    try:
        return import_module(package)
    except Exception as error:  # a placeholder may raise any exception
        if _PLACEHOLDER in str(error):
            # The top-level package whose import raised is that of the innermost frame with a module.
            modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
            blamed = next((name.partition(".")[0] for name in reversed(modules) if name), package)
            raise LibraryPlaceholder(package=blamed.replace("_", "-")) from error
        if isinstance(error, ModuleNotFoundError) and error.name in {*_PACKAGES, "torch_neuronx", "libneuronxla"}:
            raise LibraryMissing(package=error.name.replace("_", "-")) from error
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise LibraryBroken(package=package.replace("_", "-"), reason=reason) from error
