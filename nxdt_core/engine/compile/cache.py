"""The cache of ``torch.compile``: its folder, and how many of this process's graphs came from it."""

from __future__ import annotations

import os
from pathlib import Path

from nxdt_core.config.schema.run import RunConfig
from nxdt_core.distributed.devices import DeviceProfile
from nxdt_core.engine.compile_cache import TORCH_FOLDER, check_folder_writable, folder_of, graph_origins
from nxdt_core.errors.launch import CompileCacheNotAFolder, CompileIsOff
from nxdt_core.protocols.parallel.compile_ahead import CompileAhead
from nxdt_core.torch_versions import hash_meshes_alike

__all__ = ["ahead_of", "use_cache"]

_KEY = "compiler_cache_url"
_INDUCTOR = "inductor"


def use_cache(run: RunConfig, profile: DeviceProfile) -> Path | None:
    """Cache the graphs that this process compiles in the folder of ``compiler_cache_url``, or in torch's default one.

    Returns:
        The folder; None for a run that compiles nothing, and for a backend that has its own cache.

    Raises:
        CompileCacheNotAFolder: the address is not a folder.
        CompileCacheNotWritable: the folder cannot be written.
    """
    if not run.model.compile or profile.compile_backend != _INDUCTOR:
        return None
    hash_meshes_alike()
    address = run.compiler_cache_url
    if address is None:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # only a run that compiles pays for it

        folder = Path(os.environ.get(TORCH_FOLDER) or default_cache_dir()).absolute()
    else:
        named = folder_of(address)
        if named is None:
            raise CompileCacheNotAFolder(address=address, engine=run.parallel_engine.name)
        folder = named
    check_folder_writable(folder, setting=_KEY)
    os.environ[TORCH_FOLDER] = str(folder)
    return folder


def ahead_of(run: RunConfig, profile: DeviceProfile) -> CompileAhead:
    """Return how a trial of ``run`` fills the cache.

    Raises:
        CompileIsOff: the run compiles nothing.
        CompileCacheNotAFolder, CompileCacheNotWritable: see :func:`use_cache`.
    """
    if not run.model.compile:
        raise CompileIsOff(engine=run.parallel_engine.name)
    folder = use_cache(run, profile)
    if folder is None:
        return CompileAhead(cache=f"the cache of torch.compile's backend {profile.compile_backend!r}")
    return CompileAhead(cache=str(folder), origins=graph_origins)
