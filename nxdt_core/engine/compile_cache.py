"""Caches of compiled graphs: the folder that ``compiler_cache_url`` names, and which graphs came from torch's cache.

The engine decides which variable names the folder. Importing this module does not import torch, parts of which create a
folder for compiled graphs when they are imported.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from urllib.parse import unquote

from nxdt_core.config.sources.paths import expand_home
from nxdt_core.errors.launch import CompileCacheNotWritable
from nxdt_core.protocols.parallel.compile_ahead import GraphOrigins

__all__ = ["TORCH_FOLDER", "check_folder_writable", "check_torch_folder", "folder_of", "graph_origins"]

TORCH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""Torch sets it, too, when it first looks for its cache."""


def folder_of(address: str) -> Path | None:
    """Return the absolute path of a folder that ``address`` names; None for an address that is none, such as
    ``s3://…``."""
    scheme, separator, path = address.partition("://")
    if not separator:
        return expand_home(address).absolute()
    return Path(unquote(path)).absolute() if scheme.lower() == "file" else None


def check_folder_writable(folder: Path, *, setting: str) -> None:
    """Make the folder, and write a file into it that is gone again at once.

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
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return GraphOrigins(
        new=found["fxgraph_cache_miss"], found=found["fxgraph_cache_hit"], not_kept=found["fxgraph_cache_bypass"]
    )
