"""Results of operators on the meta device, remembered by the shapes of their inputs.

A model repeats the same layer many times, and a search tries layouts that repeat the same operators. Many operators
compute their result's shape in Python, which takes longer than all else that is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["meta_result"]

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_MOST = 100_000

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
_known: dict[tuple[Any, ...], tuple[_Form, ...] | None] = {}
"""Sizes, strides and dtypes of the results by operator and inputs; None where they are to be computed each time."""


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
    if len(_known) < _MOST:
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
