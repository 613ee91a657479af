"""Files of ``torch.save`` and of torch-xla, read without executing anything; tensors are read when they are needed.

torch's own restricted loader (``weights_only=True``) builds tensors and plain containers and refuses the rest. With
files written by NxD Core 0.18 and torch-xla 2.9 (models, ``.info.pt`` and ZeRO-1 states), it refuses only
``TensorReference``, which represents a tensor in a separate file. That class, and containers of hyperparameters that
callers of NxD put into ``user_content.pt``, are read as :class:`Record`: attributes without behaviour.

With ``save_xser``, a reference with a number ``n`` replaces each tensor, which is in ``<file>.tensors/tensor_<n>.pt``.
Since NxD 0.7, ``<file>.info.pt`` contains dtypes and shapes, so that they are known without opening the tensor's file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from nxdt_core.checkpoint.torch_file import TorchFileDamaged, TorchFileRefused, read_torch_file
from nxdt_core.distributed.devices import HOST
from nxdt_core.errors import NxdtError
from nxdt_plugin_migrate.errors import NeuronxFileDamaged, NeuronxMisfit, PickleRefused

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
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.int32, torch.uint32, torch.float32),
    *(torch.int64, torch.uint64, torch.float64),
)
"""Types of elements that a checkpoint can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyTensor:
    """One tensor, or a part of one."""

    name: str
    where: str
    """The file or directory that it comes from, for messages."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """The tensor, possibly a view of a mapped file."""
    stored: bool = True
    """False where the checkpoint refers to a tensor that it does not hold."""

    def rows(self, start: int, count: int, name: str) -> LazyTensor:
        """Return ``count`` rows from ``start`` on, as a leaf of another name."""
        read = self.read
        return replace(self, name=name, shape=(count, *self.shape[1:]), read=lambda: read()[start : start + count])

    def changed(
        self, change: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...] | None = None
    ) -> LazyTensor:
        """Return what ``change`` makes of it, which has ``shape`` where that differs."""
        read = self.read
        return replace(self, shape=self.shape if shape is None else shape, read=lambda: change(read()))

    def misfit(self, reason: str) -> NxdtError:
        """Return the error that it cannot be merged."""
        return NeuronxMisfit(tensor=self.name, path=self.where, reason=reason)


def concatenated(parts: Sequence[LazyTensor], dimension: int, name: str | None = None) -> LazyTensor:
    """Return the parts, one after the other along ``dimension``.

    Raises:
        NeuronxMisfit: they differ in another dimension or in dtype.
    """
    first = parts[0]

    def others(part: LazyTensor) -> tuple[object, ...]:
        return part.dtype, len(part.shape), part.shape[:dimension], part.shape[dimension + 1 :]

    if len(first.shape) <= dimension or any(others(part) != others(first) for part in parts):
        shapes = ", ".join(f"{part.shape} {str(part.dtype).removeprefix('torch.')}" for part in parts)
        raise first.misfit(f"its parts are {shapes}")
    shape = list(first.shape)
    shape[dimension] = sum(part.shape[dimension] for part in parts)
    reads = [part.read for part in parts]
    return replace(
        first,
        name=name or first.name,
        shape=tuple(shape),
        read=lambda: torch.cat([read() for read in reads], dimension),
        stored=all(part.stored for part in parts),
    )


class Record:
    """An object of a class that is known by name only: what the pickle would have set on it."""

    def __new__(cls, *_: object) -> Record:
        """Make a record without the arguments that the class itself would have been called with."""
        return super().__new__(cls)


class TensorReference(Record):
    """``torch_xla.utils.serialization.TensorReference``."""

    tid: object = None
    """Number of the tensor's file; any value that a file claims, until it is checked."""


_REFERENCE = (TensorReference, "torch_xla.utils.serialization.TensorReference")
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


class RankFile:
    """File that one rank saved at ``path``; it is read on first access."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def content(self) -> dict[Any, Any]:
        """The dictionary in the file."""
        content = read_pt(self.path)
        if not isinstance(content, dict):
            raise self._damaged(f"it holds a {type(content).__name__} instead of a dictionary")
        return content

    def is_tensor(self, value: object) -> bool:
        """Return whether :meth:`leaf` takes ``value``."""
        return isinstance(value, torch.Tensor | TensorReference)

    def leaf(self, name: str, value: object) -> LazyTensor:
        """Return the tensor that ``value``, found in :attr:`content`, is or refers to.

        Raises:
            NeuronxFileDamaged: it is none, or one that claims more than there is.
        """
        if isinstance(value, torch.Tensor):
            _check(value, self.path)
            return LazyTensor(
                name=name, where=str(self.path), dtype=value.dtype, shape=tuple(value.shape), read=lambda: value
            )
        if not isinstance(value, TensorReference):
            raise self._damaged(f"'{name}' is a {type(value).__name__} instead of a tensor")
        number = value.tid
        if type(number) is not int or number < 0:
            raise self._damaged(f"'{name}' refers to the tensor {number!r}")
        path = self.path.with_name(f"{self.path.name}.tensors") / f"tensor_{number}.pt"
        entry = self._info.get(number)
        if entry is None:
            tensor = _tensor(path)
            entry = {"dtype": tensor.dtype, "shape": tuple(tensor.shape)}
        dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        if (
            not isinstance(dtype, torch.dtype)
            or not isinstance(shape, tuple)
            or not all(type(size) is int and size >= 0 for size in shape)
        ):
            raise self._damaged(f"its table of tensors (.info.pt) has no dtype and shape of '{name}'")
        shape = tuple(shape)
        stored = path.is_file()
        if stored and math.prod(shape) * dtype.itemsize > path.stat().st_size:
            raise NeuronxFileDamaged(path=str(path), reason=f"it is too small for the shape {shape}")

        def read() -> torch.Tensor:
            tensor = _tensor(path)
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                reason = f"it holds {tuple(tensor.shape)} {tensor.dtype} instead of {shape} {dtype}"
                raise NeuronxFileDamaged(path=str(path), reason=reason)
            return tensor

        return LazyTensor(name=name, where=str(path), dtype=dtype, shape=shape, read=read, stored=stored)

    @cached_property
    def _info(self) -> Mapping[Any, Any]:
        path = self.path.with_name(f"{self.path.name}.info.pt")
        info = read_pt(path) if path.is_file() else {}
        if not isinstance(info, dict):
            raise NeuronxFileDamaged(path=str(path), reason="it is not a table of tensors")
        return info

    def _damaged(self, reason: str) -> NxdtError:
        return NeuronxFileDamaged(path=str(self.path), reason=reason)


def _tensor(path: Path) -> torch.Tensor:
    if not path.is_file():
        raise NeuronxFileDamaged(path=str(path), reason="it is missing")
    tensor = read_pt(path)
    if not isinstance(tensor, torch.Tensor):
        raise NeuronxFileDamaged(path=str(path), reason="it holds no tensor")
    _check(tensor, path)
    return tensor


def _check(tensor: torch.Tensor, path: Path) -> None:
    """Refuse a tensor that claims, by strides of zero or no storage at all, to be larger than its file."""
    plain = tensor.layout is torch.strided and tensor.device == HOST
    if not plain or tensor.dtype not in _DTYPES:
        raise NeuronxFileDamaged(path=str(path), reason=f"it holds a tensor of {tensor.dtype} that is not plain")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise NeuronxFileDamaged(path=str(path), reason=f"it has fewer elements than the shape {tuple(tensor.shape)}")
