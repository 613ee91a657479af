"""Files of ``torch.save``, read without executing anything.

torch's own restricted loader (``weights_only=True``) builds tensors and plain containers and refuses the rest. Measured
on files that NxD Core 0.18 and torch-xla 2.9 wrote: of models, ``.info.pt`` and ZeRO-1 states it refuses nothing but
``TensorReference``, which stands for a tensor in a file of its own. That class, and containers of hyperparameters that
callers of NxD put into ``user_content.pt``, are read as :class:`Record`: attributes, and no behaviour.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from nxdt_core.devices import HOST
from nxdt_plugin_migrate.errors import NeuronxFileDamaged, PickleRefused

__all__ = ["Record", "TensorReference", "read_pt"]


class Record:
    """An object of a class that is known by name only: what the pickle would have set on it."""

    def __new__(cls, *_: object) -> Record:
        """Without the arguments that the class itself would have been called with."""
        return super().__new__(cls)


class TensorReference(Record):
    """``torch_xla.utils.serialization.TensorReference``."""

    tid: object = None
    """Number of the tensor's file; any value that a file claims, until it is checked."""


_REFERENCE = (TensorReference, "torch_xla.utils.serialization.TensorReference")
_HYPERPARAMETERS = (
    "argparse.Namespace",
    "builtins.dict",
    "builtins.float",
    "builtins.int",
    "builtins.list",
    "builtins.str",
    "omegaconf.base.ContainerMetadata",
    "omegaconf.base.Metadata",
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
    "omegaconf.nodes.AnyNode",
    "typing.Any",
)
_ALLOWED: list[Any] = [_REFERENCE, *((Record, name) for name in _HYPERPARAMETERS)]


def read_pt(path: Path) -> Any:
    """Return what ``path`` holds; its tensors are mapped, and cost no memory until they are used.

    Raises:
        PickleRefused: it names a class or function that is not allowed; none was called.
        NeuronxFileDamaged: it is not a file of ``torch.save``, or an incomplete one.
    """
    _check_archive(path)
    with safe_globals(_ALLOWED):
        try:
            refused = sorted(get_unsafe_globals_in_checkpoint(str(path)))
            if not refused:
                return torch.load(path, map_location=HOST, weights_only=True, mmap=True)
        except Exception as error:  # whatever a forged or torn file makes the loader stumble over
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise NeuronxFileDamaged(path=str(path), reason=reason.rstrip(".")) from error
    raise PickleRefused(path=str(path), names=refused)


def _check_archive(path: Path) -> None:
    """See that the file holds its bytes as they are: a compressed archive could unfold to any size."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise NeuronxFileDamaged(path=str(path), reason=f"it is not an archive of torch.save ({error})") from error
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not stored or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise NeuronxFileDamaged(path=str(path), reason="its entries are packed, which torch.save never does")
