"""Files of ``torch.save``, read without executing anything.

torch's own restricted loader (``weights_only=True``) builds tensors and plain containers and refuses the rest. With
files written by NxD Core 0.18 and torch-xla 2.9 (models, ``.info.pt`` and ZeRO-1 states), it refuses only
``TensorReference``, which represents a tensor in a separate file. That class, and containers of hyperparameters that
callers of NxD put into ``user_content.pt``, are read as :class:`Record`: attributes without behaviour.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxdt_core.checkpoint.torch_file import TorchFileDamaged, TorchFileRefused, read_torch_file
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
    try:
        return read_torch_file(path, _ALLOWED)
    except TorchFileRefused as refused:
        raise PickleRefused(path=str(path), names=refused.names) from None
    except TorchFileDamaged as damaged:
        raise NeuronxFileDamaged(path=str(path), reason=str(damaged)) from damaged
