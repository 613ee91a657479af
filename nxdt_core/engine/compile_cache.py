"""Caches of compiled graphs: the folder that ``compiler_cache_url`` names, and which graphs came from torch's cache.

The engine decides which variable names the folder. Importing this module does not import torch, parts of which create a
folder for compiled graphs when they are imported.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from nxdt_core.config.schema import RunConfig
from nxdt_core.errors.launch import CompileCacheNotAFolder, CompileCacheNotWritable, CompileIsOff
from nxdt_core.protocols.engine import CompileAhead, GraphOrigins
from nxdt_core.system.paths import expand_home

if TYPE_CHECKING:
    from nxdt_core.distributed.devices import DeviceProfile

TORCH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""Torch sets it, too, when it first looks for its cache."""
_KEY = "compiler_cache_url"
_INDUCTOR = "inductor"


def folder_of(address: str) -> Path | None:
    """Return the absolute path of a folder that ``address`` names; None for an address that is none, such as
    ``s3://…``."""
    scheme, separator, path = address.partition("://")
    if not separator:
        return expand_home(address).absolute()
    return Path(unquote(path)).absolute() if scheme.lower() == "file" else None


def check_folder_writable(folder: Path, *, setting: str) -> None:
    """Create the folder, and check that a file can be written into it.

    Args:
        folder: for compiled graphs.
        setting: key or variable that names the folder, or would change it.

    Raises:
        CompileCacheNotWritable: the system does not allow it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"nxdt")
    except OSError as error:
        reason = error.strerror or str(error)
        raise CompileCacheNotWritable(path=str(folder), reason=reason, setting=setting) from error


def check_torch_folder() -> None:
    """Check that torch can create its folder for compiled graphs. Modules of torch create it when they are imported.

    Raises:
        CompileCacheNotWritable: the folder cannot be created or written.
    """
    if named := os.environ.get(TORCH_FOLDER):
        check_folder_writable(Path(named), setting=TORCH_FOLDER)


def graph_origins() -> GraphOrigins:
    """Return where the graphs of the stock backend of ``torch.compile`` came from, in this process so far.

    Forward and backward of a layer are a graph each.
    """
    utils = sys.modules.get("torch._dynamo.utils")  # what compiles first has imported it
    counts = Counter[str]() if utils is None else utils.counters["inductor"]
    return GraphOrigins(
        new=counts["fxgraph_cache_miss"],
        found=counts["fxgraph_cache_hit"],
        not_kept=counts["fxgraph_cache_bypass"],
    )


def compile_seconds() -> float:
    """Return the seconds that torch has spent compiling anywhere in this process so far.

    Forward is compiled when it first runs, and backward with it or when that first runs.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    return 0.0 if utils is None else float(utils.calculate_time_spent()["total_wall_time"])


def use_cache(run: RunConfig, profile: DeviceProfile) -> Path | None:
    """Cache the graphs that this process compiles in the folder of ``compiler_cache_url``, or in torch's default one.

    Returns:
        The folder; None for a backend that has its own cache.

    Raises:
        CompileCacheNotAFolder: the address is not a folder.
        CompileCacheNotWritable: the folder cannot be written.
    """
    if profile.compile_backend != _INDUCTOR:
        return None
    from nxdt_core.distributed.torch_versions import hash_meshes_alike

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
