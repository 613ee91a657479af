"""Live tensor bytes while code runs on the meta device, by what they are for; and what crosses the wire meanwhile.

Both see every kernel that a real step would launch, with its true shapes. On real tensors they work too.

Results of operators on the meta device are remembered by the shapes of their inputs. A model repeats the same layer
many times, and a search tries layouts that repeat the same operators. Many operators compute their result's shape in
Python, which takes longer than all else that is counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes", "Phase", "WireBytes", "meta_result"]

Phase = Literal["activations", "logits", "workspace", "gradients"]
"""``activations`` are made by a stage's forward, ``logits`` are its last output, the loss and their gradients,
``workspace`` is what backward needs on the way (recomputed activations included), ``gradients`` are of parameters."""
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_CACHE_ENTRIES = 100_000
_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
_known: dict[tuple[Any, ...], tuple[_Form, ...] | None] = {}
"""Sizes, strides and dtypes of the results by operator and inputs; None where they are to be computed each time."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that were made inside the block and still live, and remembers the peak.

    Storages are counted once however many tensors view them, in the phase in which they were made.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        """``known``: tensors from outside whose storages are counted elsewhere; they must outlive the block."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "activations"
        """What storages are counted under that are made now."""
        self.live: Counter[Phase] = Counter()
        """Bytes now, by the phase in which they were made."""
        self.peak: Counter[Phase] = Counter()
        """Bytes at the moment at which the sum was highest."""
        self._known = {_local(tensor).untyped_storage()._cdata for tensor in known}
        self._phases: dict[int, Phase] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and note the storages of its results."""
        if DTensor in types:
            return NotImplemented  # its operators on local tensors come here next
        with torch._C.DisableTorchFunction():  # modes of functions have seen what led here
            result = meta_result(func, args, kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return result

    def enter(self, phase: Phase) -> None:
        """Count what is made from now on under ``phase``."""
        self.phase = phase

    def retag(self, tensor: torch.Tensor, phase: Phase) -> None:
        """Count the storage of ``tensor`` under another phase from now on."""
        storage = _local(tensor).untyped_storage()
        old = self._phases.get(storage._cdata)
        if old is not None and old != phase:
            self._phases[storage._cdata] = phase
            self.live[old] -= storage.nbytes()
            self.live[phase] += storage.nbytes()

    @property
    def total(self) -> int:
        """All bytes that live now."""
        return sum(self.live.values())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if not size or key in self._known or key in self._phases:
            return
        self._phases[key] = self.phase
        self.live[self.phase] += size
        weakref.finalize(storage, self._forget, key, size)
        if self.total > sum(self.peak.values()):
            self.peak = self.live.copy()

    def _forget(self, key: int, size: int) -> None:
        self.live[self._phases.pop(key)] -= size


class WireBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that this rank sends in collectives, by the mesh dimension of their group.

    By the algorithms that reach the lower bound (rings): an all-gather or reduce-scatter of n ranks sends
    ``(n - 1) / n`` of the whole, an all-reduce twice that (Thakur et al. 2005, doi:10.1177/1094342005051521).
    """

    def __init__(self, dimensions: Mapping[str, str]) -> None:
        """``dimensions``: dimension by name of a process group; the rest is counted as ``other``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[str] = Counter()
        self._dimensions = dimensions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count ``func`` if it is a collective, then run it."""
        if DTensor in types:
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        rule = _SENT.get(name)
        if rule is None:
            return
        position, whole = rule
        group = _group(args)
        ranks = group.size()
        size = sum(leaf.nbytes for leaf in tree_leaves(args[position]))
        self.sent[self._dimensions.get(group.group_name, "other")] += round(size * whole(ranks))


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _others(ranks: int) -> float:
    return float(ranks - 1)


def _twice_share(ranks: int) -> float:
    return 2 * _share(ranks)


def _all(ranks: int) -> float:
    return 1.0


_SENT = {
    "allreduce_": (0, _twice_share),
    "allreduce_coalesced_": (0, _twice_share),
    "_allgather_base_": (0, _share),
    "allgather_": (0, _share),
    "allgather_into_tensor_coalesced_": (0, _share),
    "_reduce_scatter_base_": (1, _share),
    "reduce_scatter_": (1, _share),
    "reduce_scatter_tensor_coalesced_": (1, _share),
    "alltoall_base_": (1, _share),
    "alltoall_": (1, _share),
    "broadcast_": (0, _share),
    "send": (0, _all),
    "all_reduce": (0, _twice_share),
    "all_gather_into_tensor": (0, _others),
    "reduce_scatter_tensor": (0, _share),
    "all_to_all_single": (0, _share),
}
"""Collective → position of its argument that is counted, and the share of it that each of n ranks sends."""


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The process group among the arguments of a collective: an object in ``c10d``, a name in the functional ones."""
    for value in reversed(args):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return dist.distributed_c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def meta_result(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what ``func(*args, **kwargs)`` does. Where all tensors are on the meta device and the results are new
    ones, these are made from what an earlier call with such inputs gave.

    Args:
        func: the operator that a dispatch mode was called with.
        args: its positional arguments.
        kwargs: its other arguments.
    """
    if not _makes_tensors(func) or (key := _key(func, args, kwargs)) is None:
        return func(*args, **kwargs)
    if key in _known:
        forms = _known[key]
        if forms is None:
            return func(*args, **kwargs)
        made = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in forms]
        return made[0] if len(made) == 1 else tuple(made)
    result = func(*args, **kwargs)
    if len(_known) < _CACHE_ENTRIES:
        _known[key] = _forms(result, (args, kwargs))
    return result


@cache
def _makes_tensors(func: torch._ops.OpOverload) -> bool:
    """Return whether the results of an operator are tensors in a number that its signature says, and no views."""
    schema = func._schema
    values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    aliases = any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    tensors = bool(schema.returns) and all(isinstance(each.type, torch.TensorType) for each in schema.returns)
    return func.namespace == "aten" and tensors and not aliases and not values & {*func.tags}


def _key(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return what decides the results' shapes, or None if an argument is of another kind."""
    try:
        return (func, torch.get_default_dtype(), *_parts(args), *_parts(tuple(kwargs.items())))
    except _OtherKind:
        return None


class _OtherKind(Exception):
    pass


def _parts(values: tuple[Any, ...] | list[Any]) -> Iterator[Any]:
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if not value.is_meta or value.is_conj() or value.is_neg():
                raise _OtherKind
            yield value.shape, value.stride(), value.dtype
        elif kind is list or kind is tuple:
            yield len(value)
            yield from _parts(value)
        elif kind in _PLAIN:
            yield kind, value  # the kind, too, since 1, 1.0 and True are equal
        else:
            raise _OtherKind


def _forms(result: Any, given: Any) -> tuple[_Form, ...] | None:
    """Return the results' forms, or None where one of them is a part of another one or of an input."""
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    inputs = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if any(type(each) is not torch.Tensor or not each.is_meta for each in results):
        return None
    storages = [each.untyped_storage()._cdata for each in (*results, *inputs)]
    if len({*storages[: len(results)]}) < len(results) or {*storages[: len(results)]} & {*storages[len(results) :]}:
        return None
    forms = tuple((each.shape, each.stride(), each.dtype) for each in results)
    whole = all(each.storage_offset() == 0 and _is_whole(each) for each in results)
    return forms if whole else None


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of this form alone has as large a storage."""
    alone = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return alone.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
