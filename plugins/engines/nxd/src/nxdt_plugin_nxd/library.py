"""The import of neuronx-distributed, and what it and the Neuron tools read of a configuration. No torch here.

Environment variables of the runtime and of the compiler are set as NxD Training does: a variable that is set already
wins, except for compiler flags, which are appended to it. A program of the compiler fills the cache of compiled graphs
ahead of a run.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, MutableMapping
from importlib import import_module, util
from importlib.metadata import PackageNotFoundError, version
from traceback import walk_tb
from types import ModuleType
from urllib.parse import urlsplit

from nxdt_core.config import ResolvedConfig
from nxdt_core.engine.compile_cache import check_folder_writable, folder_of
from nxdt_core.protocols.engine import CompileAhead
from nxdt_plugin_nxd.config import NxdConfig
from nxdt_plugin_nxd.errors import (
    CacheNotReachable,
    CompileToolMissing,
    HostCompilesNothing,
    LibraryBroken,
    LibraryMissing,
    LibraryPlaceholder,
    VersionsDoNotFit,
)
from nxdt_plugin_nxd.hardware import LNC

CPU_MODE = "NXD_CPU_MODE"
"""The library's own variable: above 0 its layers and its pipeline run on the host, over gloo."""

_PACKAGES = ("torch_xla", "neuronx_distributed")
_PAIRED_WITH_TORCH = ("torch-xla", "torch-neuronx")
"""Packages whose first two numbers are those of the torch that they were built for."""
_PLACEHOLDER = "WRONG PACKAGE"


CACHE = "NEURON_COMPILE_CACHE_URL"
_FLAGS = "NEURON_CC_FLAGS"
_ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
_SWITCHES = {
    "xla_use_bf16": "XLA_USE_BF16",
    "xla_downcast_bf16": "XLA_DOWNCAST_BF16",
    "neuron_rt_stochastic_rounding_en": _ROUNDING,
}
_ROUNDED = "mixed_precisionSR"
_CAST_FLAGS = {
    "fp32": "--auto-cast none",
    "mixed_precision": "--enable-mixed-precision-accumulation",
    _ROUNDED: "--enable-mixed-precision-accumulation",
    "autocast": "--auto-cast none --enable-mixed-precision-accumulation",
}
"""Options that make the compiler compute in the dtypes of a policy; it rounds float32 down by default."""
TOOL = "neuron_parallel_compile"
"""Runs a command, collects the graphs that it traces, and compiles those that the cache lacks."""
COLLECTING = "NEURON_EXTRACT_GRAPHS_ONLY"
"""Variable that the tool sets for the command: graphs are written down, and return zeros."""
_DEFAULT = "/var/tmp/neuron-compile-cache"


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


def variables_of(config: ResolvedConfig) -> dict[str, str]:
    """Return the variables that a run with this engine asks for, also by the switches of ``precision.type: manual``."""
    run, selected = config.run, config.components["precision"]
    precision = None if selected is None else selected.config
    nxd_config: NxdConfig = config.selected("engine").config
    bucket = nxd_config.bucket_size_collectives
    flags = " ".join(text for text in (nxd_config.compiler_flags, _CAST_FLAGS.get(run.precision.type)) if text)
    asked: dict[str, object] = {
        _FLAGS: flags or None,
        CACHE: run.compiler_cache_url,
        LNC: run.trainer.lnc,
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": nxd_config.async_exec_max_inflight_requests,
        "BUCKET_CAP_MB": bucket,
        "ALLREDUCE_BUCKET_CAP_MB": bucket,
        "NEURON_RT_EXEC_TIMEOUT": nxd_config.neuron_rt_exec_timeout,
        "NEURON_EXPERIMENTAL_COMPRESS_RG": 1 if nxd_config.neuron_experimental_compress_rg else None,
        "NEURON_FUSE_SOFTMAX": 1 if nxd_config.fuse_softmax else None,
        _ROUNDING: 1 if run.precision.type == _ROUNDED else None,
        **{name: 1 for key, name in _SWITCHES.items() if getattr(precision, key, False) in (True, 1, "1")},
    }
    return {name: str(value) for name, value in asked.items() if value is not None}


def apply_environment(variables: Mapping[str, str], environment: MutableMapping[str, str]) -> None:
    """Set ``variables`` in ``environment``, which must happen before torch-xla is imported."""
    for name, value in variables.items():
        present = environment.get(name)
        if name == _FLAGS and present:
            environment[name] = present if value in present else f"{present} {value}"
        elif present is None:
            environment[name] = value


def check_cache() -> str:
    """Return the address of the cache that this process's environment names.

    Raises:
        CacheNotReachable: it is neither a folder nor in S3.
        CompileCacheNotWritable: the folder cannot be written.
    """
    address = os.environ.get(CACHE) or _DEFAULT
    folder = folder_of(address)
    if folder is not None:
        check_folder_writable(folder, setting=CACHE)
    elif urlsplit(address).scheme != "s3":
        raise CacheNotReachable(origin=CACHE, address=address)
    return address


def ahead_of(config: ResolvedConfig) -> CompileAhead:
    """Return how the tool fills the cache for the run of ``config``, and let this process's children use that cache.

    Raises:
        HostCompilesNothing: the library is in its CPU mode.
        CompileToolMissing: the tool is not installed.
        NxdtError: the cache cannot be used.
    """
    if computes_on_host():
        raise HostCompilesNothing(variable=CPU_MODE)
    apply_environment(variables_of(config), os.environ)
    address = check_cache()
    if os.environ.get(COLLECTING):
        return CompileAhead(cache=address)
    if shutil.which(TOOL) is None:
        raise CompileToolMissing(tool=TOOL)
    folder = folder_of(address)

    def graphs() -> frozenset[str]:
        """Return those of a folder, by the names of theirs: ``neuronxcc-<version>/MODULE_<hash>/model.neff``."""
        files = () if folder is None else folder.glob("*/MODULE_*/model.neff")
        return frozenset(file.parent.name for file in files)

    before = graphs()

    def result() -> str:
        if folder is None:
            return f"{TOOL} has named above which graphs were new"
        new = graphs() - before
        return "\n".join([f"graphs: {len(new)} new, {len(before)} in the cache before", *sorted(new)])

    return CompileAhead(cache=address, tool=(TOOL,), result=result)
