"""The Neuron cache of compiled graphs, and the program that fills it ahead of a run. No torch here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from nxdt_core.config import ResolvedConfig
from nxdt_core.engine.compile_cache import check_folder_writable, folder_of
from nxdt_core.protocols.engine import CompileAhead
from nxdt_plugin_nxd.errors import CacheNotReachable, CompileToolMissing, HostCompilesNothing
from nxdt_plugin_nxd.library import CPU_MODE, computes_on_host
from nxdt_plugin_nxd.neuron.environment import CACHE, apply_environment, variables_of

__all__ = ["ahead_of", "check_cache"]

TOOL = "neuron_parallel_compile"
"""Runs a command, collects the graphs that it traces, and compiles those that the cache lacks."""
COLLECTING = "NEURON_EXTRACT_GRAPHS_ONLY"
"""Set by the tool for the command: graphs are written down, and return zeros."""
_DEFAULT = "/var/tmp/neuron-compile-cache"


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
    return CompileAhead(cache=address, tool=(TOOL,), result=_comparison(address))


def _comparison(address: str) -> Callable[[], str]:
    folder = folder_of(address)
    if folder is None:
        return lambda: f"{TOOL} has named above which graphs were new"
    before = _compiled(folder)

    def result() -> str:
        new = _compiled(folder) - before
        return "\n".join([f"graphs: {len(new)} new, {len(before)} in the cache before", *sorted(new)])

    return result


def _compiled(folder: Path) -> frozenset[str]:
    """The graphs of a cache, by the names of their folders: ``neuronxcc-<version>/MODULE_<hash>/model.neff``."""
    return frozenset(file.parent.name for file in folder.glob("*/MODULE_*/model.neff"))
