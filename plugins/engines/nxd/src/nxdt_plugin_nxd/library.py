"""Check that neuronx-distributed can be imported, and the errors if it cannot."""

from __future__ import annotations

import logging
import os
from importlib import import_module, util
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import NoReturn

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
            _refuse_absent(package.replace("_", "-"))
    _check_versions()
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
            raise LibraryPlaceholder(package=_blamed(error) or package.replace("_", "-")) from error
        if isinstance(error, ModuleNotFoundError) and error.name in {*_PACKAGES, "torch_neuronx", "libneuronxla"}:
            raise LibraryMissing(package=error.name.replace("_", "-")) from error
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise LibraryBroken(package=package.replace("_", "-"), reason=reason) from error


def _refuse_absent(package: str) -> NoReturn:
    """Refuse a package without an importable module; PyPI's placeholder of the library has none of its name."""
    try:
        version(package)
    except PackageNotFoundError:
        raise LibraryMissing(package=package) from None
    raise LibraryPlaceholder(package=package)


def _blamed(error: BaseException) -> str | None:
    """The top-level package whose import raised: that of the innermost frame."""
    trace, name = error.__traceback__, None
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        name = module.partition(".")[0].replace("_", "-") if module else name
        trace = trace.tb_next
    return name


def _check_versions() -> None:
    for package in _PAIRED_WITH_TORCH:
        try:
            torch, found = version("torch"), version(package)
        except PackageNotFoundError:
            continue  # not installed from wheels; its own import says more
        if torch.split(".")[0] != found.split(".")[0]:
            continue  # PyPI's placeholders count from 0
        if torch.split(".")[:2] != found.split(".")[:2]:
            raise VersionsDoNotFit(torch=torch, package=package, version=found)
