"""Linear layers and embeddings sharded over tensor parallel ranks: by features, attention heads or vocabulary rows.

They replace ``torch.nn`` modules under the same paths and parameter names. Parameters are DTensors; the arithmetic runs
on local tensors. (Shoeybi et al. 2019, arXiv:1909.08053; with sequence parallelism, Korthikanti et al. 2022,
arXiv:2205.05198.)

Heads stay whole, each query head with its key's. Rank r computes query heads r·n … r·n + n−1 and the key and value
heads that those attend with. Where there are more ranks than key and value heads, neighbouring ranks hold copies of
one. Where the numbers do not divide, heads of zeros may fill up: whole groups of them behind the last, or some behind
each group's own.

A padded parameter is a DTensor of the padded shape whose parts each begin with real elements and end with zeros. The
zeros stay: layers compute with the real elements only, so that all others have gradients of exactly zero, and no
optimizer moves a zero without a gradient. Checkpoints and initial weights know the real elements alone, at their
places in the whole parameter without padding (:func:`unpadded_shard`), and so fit any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.nn import functional

from nxdt_core.distributed.collectives import (
    copy_to_group,
    gather_along,
    gather_whole,
    reduce_from_group,
    reduce_scatter_along,
)
from nxdt_core.distributed.placement import is_dtensor, local_shard_of, shard_over_mesh
from nxdt_core.engine.recompute import cast_discarded, gather_discarded, prefetch_block_input
from nxdt_core.errors.launch import HeadsDoNotDivide, SequenceDoesNotDivide
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.updates import Product, updated_linear
from nxdt_core.protocols.plan import AttentionHeads
from nxdt_core.protocols.tensor_shards import LocalShard, TensorSlice

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


SEQUENCE_DIM = 1
"""Dimension of [batch, seq, hidden] that sequence parallelism cuts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSharding:
    """The heads of one attention block over ``tp`` ranks; ``padded_*`` include heads of zeros."""

    query_heads: int
    kv_heads: int
    tp: int
    padded_kv_heads: int
    padded_group: int
    """Query heads of each key head."""

    @classmethod
    def of(cls, heads: AttentionHeads, tp: int, *, pad: bool = False) -> HeadSharding:
        """Divide ``heads`` over the ranks; ``pad`` adds heads of zeros where the numbers do not divide.

        Raises:
            HeadsDoNotDivide: the ranks would not all have the same number of whole heads of each kind, or a rank's
                query heads would need another rank's keys.
        """
        query, kv = heads.query_heads, heads.kv_heads
        group = query // kv
        padded_kv = _multiple(kv, tp) if tp < kv else next(n for n in range(kv, tp + 1) if tp % n == 0)
        padded_group = _multiple(group, tp // padded_kv) if tp > padded_kv else group
        layout = cls(query_heads=query, kv_heads=kv, tp=tp, padded_kv_heads=padded_kv, padded_group=padded_group)
        complete = heads.query and heads.key_value and heads.output
        reason = ""  # the end of a sentence
        if query % kv:
            reason = f": {kv} does not divide {query}"
        elif layout.padded and not pad and kv % tp and tp % kv:
            reason = f": neither of {kv} and {tp} divides the other"
        elif layout.padded and not pad:
            reason = f": {tp} does not divide {query}"
        elif (layout.padded or layout.kv_replicas > 1) and not complete:
            reason = (
                ": the model's plan does not say which modules make them (query, key_value, output of AttentionHeads)"
            )
        if reason:
            raise HeadsDoNotDivide(query_heads=query, kv_heads=kv, tp=tp, reason=reason)
        return layout

    @property
    def kv_replicas(self) -> int:
        """Ranks that hold a copy of the same key and value heads."""
        return max(1, self.tp // self.padded_kv_heads)

    @property
    def padded(self) -> bool:
        """Return whether heads of zeros are among them."""
        return self.padded_kv_heads * self.padded_group != self.query_heads

    def query(self, dim: int, head_dim: int) -> PaddedDim:
        """Return how the dimension ``dim`` of query heads is divided over the ranks."""
        group = self.query_heads // self.kv_heads
        block = self.padded_kv_heads * self.padded_group // self.tp
        # A rank holds whole groups, or several ranks share a group: in both cases, real heads come first on each rank.
        starts, counts = [], []
        for rank in range(self.tp):
            first_group, within = divmod(rank * block, self.padded_group)
            groups = max(0, min(block // self.padded_group, self.kv_heads - first_group))
            alone = min(block, max(0, group - within)) if first_group < self.kv_heads else 0
            counts.append(groups * group if block >= self.padded_group else alone)
            starts.append(min(first_group, self.kv_heads) * group + min(within, group))
        return PaddedDim.of(dim, block=block, starts=starts, counts=counts, unit=head_dim)

    def key_value(self, dim: int, head_dim: int) -> PaddedDim:
        """Return the same for key and value heads, over the groups of ranks that hold different ones."""
        parts = min(self.tp, self.padded_kv_heads)
        block = self.padded_kv_heads // parts
        starts = [min(part * block, self.kv_heads) for part in range(parts)]
        counts = [min(block, self.kv_heads - start) for start in starts]
        return PaddedDim.of(dim, block=block, starts=starts, counts=counts, unit=head_dim)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedDim:
    """One dimension in equal parts of ``block`` elements, the first ``counts[part]`` of which are real."""

    dim: int
    block: int
    starts: tuple[int, ...]
    """Positions of each part's real elements in the dimension without padding."""
    counts: tuple[int, ...]

    @classmethod
    def of(cls, dim: int, *, block: int, starts: Sequence[int], counts: Sequence[int], unit: int) -> PaddedDim:
        """Return the division of heads of ``unit`` elements each, from numbers of heads."""
        return cls(
            dim=dim,
            block=block * unit,
            starts=tuple(start * unit for start in starts),
            counts=tuple(count * unit for count in counts),
        )

    @property
    def parts(self) -> int:
        """Ranks, or groups of ranks that hold the same, along the dimension."""
        return len(self.starts)

    @property
    def padded(self) -> bool:
        """Return whether there are any zeros."""
        return sum(self.counts) != self.block * self.parts

    def real(self, offset: int, size: int) -> tuple[int, int]:
        """Return where the real elements of ``size`` padded ones at ``offset``, all in one part, begin without padding,
        and how many these are; they come first."""
        part = min(offset // self.block, self.parts - 1)
        within = offset - part * self.block
        count = max(0, min(size, self.counts[part] - within))
        return (self.starts[part] + within if count else 0), count


def padded_parameters(module: nn.Module) -> dict[str, PaddedDim]:
    """Return the padded parameters of a pipeline stage by name, after tensor parallelism was applied."""
    padded: dict[str, PaddedDim] = {}
    for path, part in module.named_modules():
        for leaf, dim in getattr(part, "padded", {}).items():
            padded[f"{path}.{leaf}"] = dim
    return padded


def unpadded_shard(tensor: torch.Tensor, padded: PaddedDim) -> LocalShard:
    """Return the real elements of this rank's part of a padded parameter, or of its optimizer's state.

    Args:
        tensor: of the padded shape; FSDP2 may have sharded it further.
        padded: its entry of :func:`padded_parameters`.

    Returns:
        A view of them, and their place in the whole tensor without padding; it may be empty.
    """
    shard, dim = local_shard_of(tensor), padded.dim
    offset, count = padded.real(shard.region.offsets[dim], shard.region.shape[dim])

    def with_dim(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    region = TensorSlice(with_dim(shard.region.offsets, offset), with_dim(shard.region.shape, count))
    return LocalShard(shard.tensor.narrow(dim, 0, count), with_dim(shard.shape, sum(padded.counts)), region)


class BlockEntry:
    """Forward pre-hook of a tensor block: makes its first argument whole, and its gradient a sum over the ranks."""

    def __init__(
        self, group: dist.ProcessGroup, *, sequence_parallel: bool, routes: bool = False, again: bool = False
    ) -> None:
        """``routes``: whether a router of experts is in the block, whose scores are computed in float32. The matrices
        of other blocks are multiplied in autocast's dtype, so that nothing wider is sent to them. ``again``: gather
        what backward needs a second time."""
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.routes = routes
        self.again = again

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """``args[0]`` is [batch, seq, hidden], or under sequence parallelism this rank's part along seq.

        Raises:
            TypeError: the model hands it over by keyword, where no plan can find it.
        """
        if not args:
            raise TypeError(f"{type(module).__name__} is a tensor block: give it its hidden states by position")
        hidden, *rest = args
        dtype = hidden.dtype if self.routes else compute_dtype(hidden)
        if self.again:
            return gather_discarded(module, hidden, dtype, SEQUENCE_DIM, self.group), *rest
        hidden = cast_discarded(module, hidden, dtype)
        if self.sequence_parallel:
            return gather_along(hidden, SEQUENCE_DIM, self.group), *rest
        return copy_to_group(hidden, self.group), *rest


class _ShardedLinear(nn.Module):
    """A linear layer of which each rank has a part, perhaps with zeros at the end."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        spread: PaddedDim,
        part: int,
        update: nn.Module | None = None,
    ) -> None:
        """``weight`` [out, in]: a DTensor, sharded as ``spread`` says, of which this rank has ``part``; ``update`` is
        cut likewise."""
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.update = update
        self.product: Product = functional.linear
        """A slot: the product of inputs and this rank's part of the weight."""
        self.padded = _padded_dims(spread, self)
        """Parameters with zeros at the end."""
        self.real = spread.counts[part]
        self.zeros = spread.block - self.real


class ColumnParallelLinear(_ShardedLinear):
    """A linear layer of which each rank computes its own output features, from whole inputs (:class:`BlockEntry`).
    ``weight`` and ``bias`` [out] have ``Shard(0)``."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out / tp]; zeros for the features that are padding."""
        weight = local_part(self.weight)
        bias = None if self.bias is None else local_part(self.bias)
        if self.zeros == 0:
            return updated_linear(hidden, weight, bias, self.update, product=self.product)
        product = functional.pad(self.product(hidden, weight[: self.real]), (0, self.zeros))
        if self.update is not None:
            product = self.update(hidden, product, weight)
        return product if bias is None else product + functional.pad(bias[: self.real], (0, self.zeros))


class GatheredColumnLinear(ColumnParallelLinear):
    """A column-parallel layer that returns the features of all ranks. Their gradients are partial sums, or are equal
    on all ranks where the layer ends a tensor block."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        group: dist.ProcessGroup,
        ends_block: bool,
        **options: Any,
    ) -> None:
        """``group``: the tensor parallel ranks; other arguments as of :class:`ColumnParallelLinear`, cut evenly."""
        super().__init__(weight, bias, **options)
        self.group, self.ends_block = group, ends_block

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        gather = gather_whole if self.ends_block else gather_along
        return gather(super().forward(hidden), -1, self.group)


class RowParallelLinear(_ShardedLinear):
    """A linear layer of which each rank multiplies its own input features; products are summed over the ranks, then the
    bias is added. ``weight`` has ``Shard(1)``, ``bias`` is whole on each rank, and ``update`` gives parts of the same
    sum."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool,
        **options: Any,
    ) -> None:
        """``group``: the tensor parallel ranks; other arguments as of :class:`ColumnParallelLinear`."""
        super().__init__(weight, bias, part=group.rank(), **options)
        self.group = group
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, seq, in / tp] to [batch, seq, out], or to [batch, seq / tp, out] under sequence parallelism."""
        weight = local_part(self.weight)
        if self.zeros:
            hidden = hidden[..., : self.real]
            product = self.product(hidden, weight[:, : self.real])
        else:
            product = self.product(hidden, weight)
        if self.update is not None:
            # A head of zeros gives the mean of the values that it attends to: an update would learn from it.
            product = self.update(functional.pad(hidden, (0, self.zeros)) if self.zeros else hidden, product, weight)
        total = self.total(product)
        return total if self.bias is None else total + self.bias

    def total(self, product: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' products."""
        prefetch_block_input(self, product)
        return sum_over_ranks(product, self.group, sequence_parallel=self.sequence_parallel)


class PartialRowLinear(RowParallelLinear):
    """A row-parallel layer without the sum, which a later module makes. It has no bias."""

    def total(self, product: torch.Tensor) -> torch.Tensor:
        """Return this rank's product, without the sum over ranks."""
        return product


class SplitRowLinear(RowParallelLinear):
    """A row-parallel layer of inputs with the features of all ranks. Gradients of the other ranks' features are zero,
    so that gradients before it are partial sums, as everywhere in a tensor block."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, seq, in] to [batch, seq, out], or to [batch, seq / tp, out] under sequence parallelism."""
        width = hidden.shape[-1] // self.group.size()
        return super().forward(hidden.narrow(-1, self.group.rank() * width, width))


class FeatureShard(nn.Module):
    """A module with this rank's heads or channels of parameters and buffers that have a leading dimension of those."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        spread: PaddedDim,
        part_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """
        Args:
            module: the module with all heads or channels; it has no children.
            parameters: by name, DTensors with ``Shard(0)`` in the place of the module's own.
            spread: how the leading dimension is cut.
            part_of: this rank's part of a whole tensor.
        """
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        for name, buffer in module.named_buffers():
            self.register_buffer(name, part_of(buffer), persistent=False)
        self._inner = (module,)  # in a tuple, so that its own parameters are not found
        self._part_of = part_of
        self.padded = _padded_dims(spread, self)
        """Parameters with zeros at the end."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module computes, with this rank's part of each parameter and buffer."""
        parameters = {name: local_part(parameter) for name, parameter in self.named_parameters()}
        return functional_call(self._inner[0], parameters | dict(self.named_buffers()), args, kwargs)

    def reset_buffers(self) -> None:
        """Let the module compute its whole buffers, and keep this rank's part of each."""
        (inner,), buffers = self._inner, dict(self.named_buffers())
        reset = getattr(inner, "reset_buffers", None)
        if not buffers or reset is None:
            return
        shapes = dict(inner.named_buffers())
        empty = {name: torch.empty_like(shape, device=buffers[name].device) for name, shape in shapes.items()}
        for name, buffer in empty.items():
            setattr(inner, name, buffer)
        reset()
        for name, shape in shapes.items():
            whole = getattr(inner, name)
            if whole is not empty[name] or whole._version:  # what it left alone is reported where memory is allocated
                buffers[name].copy_(self._part_of(whole))
            setattr(inner, name, shape)  # on the meta device, so that no rank holds the whole


def sum_over_ranks(partial: torch.Tensor, group: dist.ProcessGroup | None, *, sequence_parallel: bool) -> torch.Tensor:
    """End a tensor block: return the sum of the ranks' ``partial`` [batch, seq, hidden], or this rank's part of it
    along the sequence under sequence parallelism."""
    if sequence_parallel:
        return reduce_scatter_along(partial, SEQUENCE_DIM, group)
    return reduce_from_group(partial, group)


def _padded_dims(spread: PaddedDim, layer: nn.Module) -> dict[str, PaddedDim]:
    """Return the parameters of ``layer`` that are sharded as ``spread`` says, where that has zeros."""
    if not spread.padded:
        return {}
    named = dict(layer.named_parameters())
    return {name: spread for name, parameter in named.items() if is_dtensor(parameter)}


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, inside autograd; the gradient gets the parameter's own placements."""
    return parameter.to_local() if is_dtensor(parameter) else parameter


class VocabParallelEmbedding(nn.Module):
    """An embedding sharded by vocabulary row: each rank looks up its own ids and zero for others, and the ranks are
    summed."""

    def __init__(
        self,
        weight: nn.Parameter,
        group: dist.ProcessGroup,
        *,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        update: nn.Module | None = None,
    ) -> None:
        """``weight`` [vocab, hidden]: a DTensor with ``Shard(0)``, cut evenly; ``update`` likewise."""
        super().__init__()
        self.weight = weight
        self.update = update
        self.group = group
        self.padding_idx = padding_idx
        self.sequence_parallel = sequence_parallel

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [batch, seq, hidden] of int64 [batch, seq]; [batch, seq / tp, hidden] under sequence parallelism.

        Raises:
            IndexError: an id outside of the vocabulary (a device-side failure on accelerators), as ``nn.Embedding``.
            SequenceDoesNotDivide: under sequence parallelism.
        """
        if self.sequence_parallel:
            check_sequence(ids.shape[-1], self.group)
        table = local_part(self.weight)
        rows, elsewhere = local_vocab_rows(ids, len(table), self.group)
        padding = None if self.padding_idx is None else self.padding_idx - self.group.rank() * len(table)
        if padding is not None and not 0 <= padding < len(table):
            padding = None
        embedded = functional.embedding(rows, table, padding_idx=padding)
        if self.update is not None:
            embedded = self.update(rows, embedded, table)
        embedded = embedded.masked_fill(elsewhere.unsqueeze(-1), 0)
        return sum_over_ranks(embedded, self.group, sequence_parallel=self.sequence_parallel)


class SequenceParallelEmbedding(nn.Module):
    """A whole table, such as learned positions, that looks up this rank's part of the sequence."""

    def __init__(
        self,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        padding_idx: int | None = None,
        update: nn.Module | None = None,
    ) -> None:
        """``weight`` [rows, hidden]: a parameter, whole on each rank, as ``update`` is."""
        super().__init__()
        self.weight = weight
        self.update = update
        self.group = group
        self.padding_idx = padding_idx

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows [..., seq / tp, hidden] of ids, int64 [..., seq]."""
        length = check_sequence(ids.shape[-1], self.group)
        part = ids.narrow(-1, self.group.rank() * length, length)
        embedded = functional.embedding(part, self.weight, padding_idx=self.padding_idx)
        return embedded if self.update is None else self.update(part, embedded, self.weight)


class VocabParallelHead(nn.Module):
    """The output projection sharded by vocabulary: each rank computes its logits from whole hidden states."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, mesh: DeviceMesh, *, update: nn.Module | None = None
    ) -> None:
        """``weight`` [vocab, hidden] and ``bias`` [vocab]: DTensors with ``Shard(0)`` on ``mesh``; ``update``
        likewise."""
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.update = update
        self.mesh = mesh

    def forward(self, hidden: torch.Tensor) -> DTensor:
        """[..., hidden] to logits [..., vocab], a DTensor with ``Shard(-1)``: an objective that takes them for whole
        fails instead of being wrong silently."""
        bias = None if self.bias is None else local_part(self.bias)
        logits = updated_linear(hidden, local_part(self.weight), bias, self.update)
        return shard_over_mesh(logits, self.mesh, -1)


def check_sequence(length: int, group: dist.ProcessGroup) -> int:
    """Return the positions of a sequence on each rank under sequence parallelism."""
    if length % group.size():
        raise SequenceDoesNotDivide(length=length, ranks=group.size())
    return length // group.size()


def local_vocab_rows(ids: torch.Tensor, rows: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the vocabulary as row numbers of this rank's part, which has ``rows`` rows.

    Returns:
        Row numbers, 0 for ids on other ranks, and a mask of those. Ids on no rank stay out of range,
        so that the lookup fails on them.
    """
    local = ids - group.rank() * rows
    elsewhere = (local < 0) | (local >= rows)
    exists = (ids >= 0) & (ids < group.size() * rows)
    return local.masked_fill(elsewhere & exists, 0), elsewhere
