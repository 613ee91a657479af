"""Reads one rank's file with its tensors as leaves: in the file itself, or in separate files if ``save_xser`` was on.

In the second form, a reference with a number ``n`` replaces each tensor, which is in ``<file>.tensors/tensor_<n>.pt``.
Since NxD 0.7, ``<file>.info.pt`` contains dtypes and shapes, so that they are known without opening the tensor's file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES
from nxdt_core.distributed.devices import HOST
from nxdt_core.errors.base import NxdtError
from nxdt_plugin_migrate.checkpoint.lazy_tensor import Leaf
from nxdt_plugin_migrate.checkpoint.unpickle import TensorReference, read_pt
from nxdt_plugin_migrate.errors import NeuronxFileDamaged

__all__ = ["RankFile"]


class RankFile:
    """What one rank saved at ``path``; read when it is first asked for."""

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

    def leaf(self, name: str, value: object) -> Leaf:
        """Return the tensor that ``value``, found in :attr:`content`, is or refers to.

        Raises:
            NeuronxFileDamaged: it is none, or one that claims more than there is.
        """
        if isinstance(value, torch.Tensor):
            _check(value, self.path)
            return Leaf(
                name=name, where=str(self.path), dtype=value.dtype, shape=tuple(value.shape), read=lambda: value
            )
        if not isinstance(value, TensorReference):
            raise self._damaged(f"'{name}' is a {type(value).__name__} instead of a tensor")
        return self._referred(name, value.tid)

    def _referred(self, name: str, number: object) -> Leaf:
        if type(number) is not int or number < 0:
            raise self._damaged(f"'{name}' refers to the tensor {number!r}")
        path = self.path.with_name(f"{self.path.name}.tensors") / f"tensor_{number}.pt"
        told = self._info.get(number)
        if told is None:
            value = _tensor(path)
            dtype, shape = value.dtype, tuple(value.shape)
        else:
            dtype, shape = self._told(name, told)
        stored = path.is_file()
        if stored and math.prod(shape) * dtype.itemsize > path.stat().st_size:
            raise NeuronxFileDamaged(path=str(path), reason=f"it is too small for the shape {shape}")

        def read() -> torch.Tensor:
            tensor = _tensor(path)
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                reason = f"it holds {tuple(tensor.shape)} {tensor.dtype} instead of {shape} {dtype}"
                raise NeuronxFileDamaged(path=str(path), reason=reason)
            return tensor

        return Leaf(name=name, where=str(path), dtype=dtype, shape=shape, read=read, stored=stored)

    @cached_property
    def _info(self) -> Mapping[Any, Any]:
        path = self.path.with_name(f"{self.path.name}.info.pt")
        info = read_pt(path) if path.is_file() else {}
        if not isinstance(info, dict):
            raise NeuronxFileDamaged(path=str(path), reason="it is not a table of tensors")
        return info

    def _told(self, name: str, told: object) -> tuple[torch.dtype, tuple[int, ...]]:
        dtype, shape = (told.get("dtype"), told.get("shape")) if isinstance(told, dict) else (None, None)
        if (
            not isinstance(dtype, torch.dtype)
            or not isinstance(shape, tuple)
            or not all(type(size) is int and size >= 0 for size in shape)
        ):
            raise self._damaged(f"its table of tensors (.info.pt) has no dtype and shape of '{name}'")
        return dtype, tuple(shape)

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
    """A tensor may claim, by strides of zero or no storage at all, to be larger than its file."""
    plain = tensor.layout is torch.strided and tensor.device == HOST
    if not plain or str(tensor.dtype).removeprefix("torch.") not in ITEM_BYTES:
        raise NeuronxFileDamaged(path=str(path), reason=f"it holds a tensor of {tensor.dtype} that is not plain")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise NeuronxFileDamaged(path=str(path), reason=f"it has fewer elements than the shape {tuple(tensor.shape)}")
