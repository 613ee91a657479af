"""Files of ``torch.save`` from elsewhere, read without executing anything that they name.

torch's own restricted loader (``weights_only=True``) builds tensors and plain containers. For other classes that a
file may name, the caller gives classes that stand for them.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from nxdt_core.distributed.devices import HOST
from nxdt_core.system.regular_files import require_fetched, require_inside

__all__ = ["TorchFileDamaged", "TorchFileRefused", "read_torch_file"]


class TorchFileDamaged(Exception):
    """The file is not one of ``torch.save``, or an incomplete one; the message says why."""


class TorchFileRefused(Exception):
    """The file names classes or functions that are not allowed."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


def read_torch_file(path: Path, allowed: list[Any]) -> Any:
    """Return what ``path`` holds; its tensors are memory-mapped and use no memory until they are accessed.

    Args:
        path: the file.
        allowed: as for ``torch.serialization.safe_globals``.

    Raises:
        TorchFileRefused: it names a class or function that is not allowed; none was called.
        TorchFileDamaged: it is not a file of ``torch.save``, or an incomplete one.
    """
    try:
        require_inside(path, path.parent)
        require_fetched(path)
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise TorchFileDamaged(f"it is not an archive of torch.save ({error})") from error
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)  # a packed one may expand to any size
    if not stored or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise TorchFileDamaged("its entries are packed, which torch.save never does")
    with safe_globals(allowed):
        try:
            refused = sorted(get_unsafe_globals_in_checkpoint(str(path)))
            if not refused:
                return torch.load(path, map_location=HOST, weights_only=True, mmap=True)
        except Exception as error:  # any error that a forged or incomplete file causes in the loader
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise TorchFileDamaged(reason.rstrip(".")) from error
    raise TorchFileRefused(refused)
