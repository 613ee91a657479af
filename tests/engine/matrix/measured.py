"""Measures what a rank holds: bytes between steps and within one, and the shapes of its activations."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Shapes = set[tuple[int, ...]]


@dataclass(kw_only=True)
class Measured:
    """Findings on one rank; bytes of local shards by global parameter name."""

    weights: dict[str, int]
    """Between steps."""
    gradients: dict[str, int]
    """Right after ``run_train``."""
    optimizer: int
    """State between steps, without scalars."""
    live: int
    """All that Python can reach between steps, beyond what there was before the model."""
    activations: Activations


@dataclass(kw_only=True)
class Activations:
    """What forward passes of one step left behind."""

    outputs: dict[str, Shapes] = field(default_factory=dict)
    """Shapes of floating-point outputs by module name."""
    saved: Shapes = field(default_factory=set)
    """Shapes of floating-point tensors that were kept for backward."""
    unsharded_weights: dict[str, int] = field(default_factory=dict)
    """Bytes of each weight at the end of the last forward, where ZeRO-3 has freed the layers again."""
    waiting_gradients: int = 0
    """Bytes of gradients at the end of the last forward: those of the micro-batches before."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size(tensor: torch.Tensor) -> int:
    """Bytes of this rank's shard."""
    shard = local(tensor)
    return shard.numel() * shard.element_size()


def weight_bytes(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, int]:
    return {name: size(parameter) for name, parameter in parameters}


def gradient_bytes(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, int]:
    return {name: size(parameter.grad) for name, parameter in parameters if parameter.grad is not None}


def optimizer_bytes(inner: torch.optim.Optimizer) -> int:
    values = (value for state in inner.state.values() for value in state.values())
    return sum(size(value) for value in values if isinstance(value, torch.Tensor) and value.dim())


def live_bytes() -> int:
    """Storage of every tensor that the garbage collector knows, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not is_traceable_wrapper_subclass(thing) and not _is_empty(thing):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _is_empty(tensor: torch.Tensor) -> bool:
    """Whether it has no memory. In torch 2.9 the collector may know Python objects of tensors that are gone."""
    try:
        return tensor.device.type == "meta"
    except RuntimeError:
        return True


@contextmanager
def watched(modules: Sequence[nn.Module]) -> Iterator[Activations]:
    """Within the block, note what forward passes through ``modules`` (a rank's stages) leave behind."""
    seen = Activations()

    def noted_output(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in _tensors(output):
            seen.outputs.setdefault(name, set()).add(tuple(local(tensor).shape))

    def noted_end(module: nn.Module, arguments: Any, output: Any) -> None:
        named = list(module.named_parameters())
        seen.unsharded_weights.update(weight_bytes(named))
        seen.waiting_gradients = sum(gradient_bytes(named).values())

    def noted_saved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            seen.saved.add(tuple(local(tensor).shape))
        return tensor.detach()  # the tensor itself would hold the graph that holds it, for good

    hooks = [
        part.register_forward_hook(partial(noted_output, name))
        for module in modules
        for name, part in module.named_modules()
        if not isinstance(part, nn.Identity)  # in place of what lies on other stages
    ]
    hooks += [module.register_forward_hook(noted_end) for module in modules]
    with torch.autograd.graph.saved_tensors_hooks(noted_saved, lambda tensor: tensor):
        yield seen
    for hook in hooks:
        hook.remove()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
