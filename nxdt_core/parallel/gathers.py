"""Gathering weights under autocast: those of matrix products travel in autocast's dtype, to which it casts them anyway.

What is gathered is bitwise what the product would have made of the float32 weight, so results do not change. Norms,
embeddings, routers, biases and weights that an adapter reads stay as they are: they are computed with in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nxdt_core.nn.moe.experts import SwiGLUExperts
from nxdt_core.nn.patterns import matches, matches_any
from nxdt_core.nn.updates import ProductLinear
from nxdt_core.parallel.tensor.layers import ColumnLinear, GatheredColumnLinear, RowLinear
from nxdt_core.parallel.tensor.vocabulary_layers import VocabularyHead
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.torch_versions import all_gather_single, fsdp_parameter_groups

__all__ = ["gather_narrow", "product_weights"]

_LINEAR = (ProductLinear, ColumnLinear, GatheredColumnLinear, RowLinear, VocabularyHead)
_NOT_LINEAR = ("vocab_embedding", "replicate", "heads", "channels")
_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def product_weights(module: nn.Module, plan: ParallelPlan) -> frozenset[str]:
    """Return the names of parameters of a stage that nothing but one matrix product reads.

    They are the weights of linear layers that the plan lets tensor parallelism cut, and of experts.
    """
    tied = {name for pair in plan.tied for name in pair}
    found = set()
    for path, part in module.named_modules():
        if _is_linear(path, part, plan):
            found.add(f"{path}.weight")
        elif isinstance(part, SwiGLUExperts) and matches_any(plan.experts, path) and not part.updates:
            found |= {f"{path}.{name}" for name in _EXPERTS}
    return frozenset(found - tied)


def _is_linear(path: str, part: nn.Module, plan: ParallelPlan) -> bool:
    style = next((style for pattern, style in plan.tensor.items() if matches(pattern, path)), None)
    if style is None or style in _NOT_LINEAR or getattr(part, "update", None) is not None:
        return False
    return isinstance(part, _LINEAR) or (isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward)


def gather_narrow(sharded: FSDPModule, weights: Collection[nn.Parameter], dtype: torch.dtype) -> None:
    """Let what FSDP2 gathers for ``sharded`` travel in ``dtype`` where it is one of ``weights``, in float32 otherwise.

    Args:
        sharded: by ``fully_shard``.
        weights: as they are after it.
        dtype: of two bytes.
    """
    groups = fsdp_parameter_groups(sharded._get_fsdp_state())
    if not groups:  # a root all of whose parameters are those of its parts
        return
    (group,) = groups
    chosen = {id(weight) for weight in weights}
    segments = [
        (parameter._sharded_param_data.numel(), id(parameter.sharded_param) in chosen)
        for parameter in group.fsdp_params
    ]
    if any(narrow for _, narrow in segments):
        cast(Any, sharded).set_custom_all_gather(_NarrowGather(segments, dtype))


class _NarrowGather:
    """FSDP2's all-gather of the parameters of a group, one after the other in a flat buffer."""

    def __init__(self, segments: list[tuple[int, bool]], dtype: torch.dtype) -> None:
        """``segments``: elements of each, and whether they travel in ``dtype``."""
        self._sizes = [size for size, _ in segments]
        self._narrow = [narrow for _, narrow in segments]
        self._lengths = [size if narrow else 2 * size for size, narrow in segments]
        """Elements of ``dtype`` that travel for each."""
        self._dtype = dtype

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather ``input_tensor`` of all ranks into ``output_tensor``."""
        if input_tensor.dtype != torch.float32:
            work: dist.Work | None = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        parts = torch.split(input_tensor, self._sizes)
        sent = torch.cat([self._packed(part, narrow) for part, narrow in zip(parts, self._narrow, strict=True)])
        ranks = group.size()
        received = sent.new_empty(ranks * sent.numel())
        work = all_gather_single(received, sent, group=group, async_op=async_op)

        def unpack() -> None:
            of_ranks = torch.split(received.view(ranks, -1), self._lengths, 1)
            outputs = torch.split(output_tensor.view(ranks, -1), self._sizes, 1)
            for packed, whole, narrow in zip(of_ranks, outputs, self._narrow, strict=True):
                whole.copy_(packed if narrow else packed.contiguous().view(torch.float32))

        if work is None:
            unpack()
            return None
        return _Unpacking(work, unpack)

    def _packed(self, part: torch.Tensor, narrow: bool) -> torch.Tensor:
        """Elements of two bytes: rounded, or the halves of float32 as they are."""
        return part.to(self._dtype) if narrow else part.view(self._dtype)


class _Unpacking(dist.Work):
    """What a rank waits for: the gather, then its unpacking."""

    def __init__(self, work: dist.Work, unpack: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._unpack = work, unpack

    def wait(self, *arguments: Any) -> bool:
        """Wait until the output is whole."""
        done = self._work.wait(*arguments)
        self._unpack()
        return done
