"""Expert parallelism by a model's plan: experts sharded over ``ep``, each over ``tp``; routers and their metrics.

An expert's gradient is a sum over the tokens of all ``ep`` ranks; the ranks of ``efsdp``, which hold the same experts,
have the rest. A router is in a tensor block: its gradient is a partial sum over ``tp``. Metrics of routers are those of
the whole global batch: load of the experts, dropped tokens, entropy.

Tokens are exchanged with the ranks that hold their experts. Tensor parallel ranks route the same tokens. Each may send
them whole to its ``ep`` peers, or a slice of their features, which the peers put together. Slices send less over ``ep``
and more over ``tp``. This pays where the ranks of ``ep`` are on several machines.

Token shuffling mixes the tokens of several data parallel ranks before their experts, and undoes it after them. Experts
of bounded capacity drop what a micro-batch has too many of. A micro-batch of very similar documents has too many tokens
for few experts; mixed with those of other ranks, it asks for their average. Every n-th token goes to each of n ranks
and keeps its position, to within n. There are no random numbers: recomputation and resumed runs repeat it without
state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from nxdt_core.distributed.collectives import (
    all_to_all,
    all_to_all_rows,
    gather_along,
    gather_whole,
    overlap_all_to_all,
    reduce_scatter_along,
)
from nxdt_core.distributed.placement import shard_over_mesh
from nxdt_core.engine.context.blocks import zigzag_chunks, zigzag_unshard
from nxdt_core.engine.mesh import Dimension, ParallelMesh
from nxdt_core.engine.recompute import prefetch_block_input
from nxdt_core.engine.tensor.layers import local_part, sum_over_ranks
from nxdt_core.errors.launch import ShardDoesNotDivide, TensorPlanUnusable
from nxdt_core.errors.layouts import ExpertsDoNotDivide, ModelWithoutExperts
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.host_values import host_values
from nxdt_core.models.moe.dispatch import LocalDispatcher, TokenPermutation, permute, unpermute
from nxdt_core.models.moe.experts import RowGroups
from nxdt_core.models.moe.router import Routing, WholeMicroBatch, exclusive_cumsum
from nxdt_core.models.patterns import matches, modules_at
from nxdt_core.models.random.dropout import Dropout
from nxdt_core.models.updates import Update
from nxdt_core.protocols.plan import ParallelPlan

_PerChunk = list[list[int]]
Sliced = Literal["none", "capacity", "all"]
"""Rows that are sent in slices; ``capacity``: those of experts with a capacity. Torch 2.13 cannot compile the backward
of others, whose number depends on data and which are gathered."""
_SHARDED_DIM = {"column": 1, "row": 2}
"""Dimension in which matrices [experts, out, in] are sharded; biases [experts, out] of row-parallel ones are whole."""
_STATISTICS = 3
"""Columns behind those of the experts: dropped assignments, entropies, tokens."""


class ExchangingDispatcher(LocalDispatcher):
    """Experts in consecutive equal parts over the ranks of a group.

    An expert sees the tokens of all ranks, and its gradient is their sum. All ranks of the group call it equally often,
    forward and backward. Without capacity the ranks may have any number of tokens; with it, equally many, since then
    every size follows from that number and no rank needs to ask.
    """

    def __init__(self, group: dist.ProcessGroup | None, chunks: int = 1) -> None:
        """``group``: the expert parallel ranks; None for one. ``chunks``: parts in which rows are sent, one of which
        travels while the experts compute another one; equal on all ranks."""
        super().__init__(chunks if group is not None else 1)
        self.group = group

    @property
    def rank(self) -> int:
        """Return which of the equal parts of the experts this process has."""
        return 0 if self.group is None else self.group.rank()

    def ordered(self, routing: Routing) -> tuple[TokenPermutation, torch.Tensor]:
        """Return the rows by chunk and then by expert, and how many of each there are [chunks, experts]. A chunk has an
        equal part of the assignments, in the order of their tokens."""
        if self.chunks == 1:
            return super().ordered(routing)
        experts, assigned = len(routing.counts), routing.experts.flatten()
        numbers = torch.arange(1, len(assigned) + 1, device=assigned.device)
        chunk_of = (numbers * self.chunks - 1).div(max(1, len(assigned)), rounding_mode="floor")  # as _bounds
        groups = chunk_of * experts + assigned
        permutation = TokenPermutation.ordered(groups, routing.experts.shape[1])
        edges = torch.arange(self.chunks * experts + 1, device=assigned.device)
        starts = torch.searchsorted(groups.index_select(0, permutation.assignment_of), edges)
        return permutation, starts.diff().view(self.chunks, experts)

    def run_ordered(self, rows: torch.Tensor, counts: torch.Tensor, experts: nn.Module) -> torch.Tensor:
        """Compute :meth:`LocalDispatcher.run_ordered` over the ranks of the group. The host waits for the device once,
        to learn how much is coming."""
        if self.group is None:
            return super().run_ordered(rows, counts, experts)
        ranks = self.group.size()
        sent = counts.view(self.chunks, ranks, -1).transpose(0, 1)  # [ranks, chunks, experts of one rank]
        received = all_to_all_rows(sent.contiguous(), self.group)
        outgoing, incoming, sizes = _sizes(sent, received, len(rows))
        low_precision = rows.to(compute_dtype(rows))  # which the experts would do
        numbers = torch.arange(received.shape[2], device=rows.device).repeat(ranks)
        arrivals = [
            TokenPermutation.ordered(numbers.repeat_interleave(here.flatten(), output_size=sum(coming)))
            for here, coming in zip(received.unbind(1), incoming, strict=True)
        ]

        def compute(chunk: int, arrived: torch.Tensor) -> torch.Tensor:  # by rank of origin, then by expert
            groups = RowGroups(received[:, chunk].sum(0), None if sizes is None else sizes[chunk])
            return unpermute(experts(permute(arrived, arrivals[chunk]), groups), arrivals[chunk]).squeeze(1)

        if self.chunks == 1:
            arrived = all_to_all(low_precision, incoming[0], outgoing[0], self.group)
            return all_to_all(compute(0, arrived), outgoing[0], incoming[0], self.group)
        bounds = _bounds(len(rows), self.chunks)
        parts = [low_precision[start:end] for start, end in pairwise(bounds)]
        return torch.cat(overlap_all_to_all(compute, parts, list(zip(outgoing, incoming, strict=True)), self.group))

    def run_padded(self, rows: torch.Tensor, experts: nn.Module) -> torch.Tensor:
        """Compute :meth:`LocalDispatcher.run_padded` over the ranks of the group; the host waits for nothing. A chunk
        has an equal part of each expert's capacity."""
        if self.group is None:
            return super().run_padded(rows, experts)
        ranks, (count, capacity, hidden) = self.group.size(), rows.shape
        low_precision = rows.to(compute_dtype(rows))
        sizes = [end - start for start, end in pairwise(_bounds(capacity, self.chunks))]
        splits = [[count // ranks * size] * ranks for size in sizes]

        def compute(chunk: int, arrived: torch.Tensor) -> torch.Tensor:
            by_expert = arrived.view(ranks, -1, sizes[chunk], hidden).transpose(0, 1)
            outputs = experts(by_expert.flatten(1, 2)).view(by_expert.shape)  # [experts here, ranks, size, hidden]
            returned: torch.Tensor = outputs.transpose(0, 1).flatten(0, 2)
            return returned

        if self.chunks == 1:
            (equal,) = splits
            arrived = all_to_all(low_precision.flatten(0, 1), equal, equal, self.group, equal=True)
            return all_to_all(compute(0, arrived), equal, equal, self.group, equal=True).view(rows.shape)
        parts = [part.flatten(0, 1) for part in torch.split(low_precision, sizes, 1)]
        outputs = overlap_all_to_all(compute, parts, [(equal, equal) for equal in splits], self.group)
        pairs = zip(outputs, sizes, strict=True)
        return torch.cat([output.view(count, size, hidden) for output, size in pairs], 1)


def _bounds(rows: int, chunks: int) -> list[int]:
    """Return the first row of each chunk, and the end of the last one."""
    return [rows * chunk // chunks for chunk in range(chunks + 1)]


def _sizes(sent: torch.Tensor, received: torch.Tensor, rows: int) -> tuple[_PerChunk, _PerChunk, _PerChunk | None]:
    """Rows that go to each rank, that come from each, and of each expert here, on the host, for each chunk; ``sent``
    and ``received`` [ranks, chunks, experts]. A graph reads the last ones only where it needs them: None.

    On the meta device, where a run is planned, the sizes are unknown: ``rows`` are then shared out equally.
    """
    ranks, chunks, experts = sent.shape
    if sent.is_meta:
        edges = _bounds(rows, chunks)
        equal = [
            [end - start for start, end in pairwise(_bounds(last - first, ranks))] for first, last in pairwise(edges)
        ]
        return equal, equal, None
    asked = [sent.sum(2).t(), received.sum(2).t()]
    if not torch.compiler.is_compiling():
        asked.append(received.sum(0))
    values = iter(host_values(torch.cat([tensor.flatten() for tensor in asked])))

    def take(count: int) -> _PerChunk:
        return [list(islice(values, count)) for _ in range(chunks)]

    return take(ranks), take(ranks), take(experts) if len(asked) == 3 else None


class AllToAllDispatcher(ExchangingDispatcher):
    """Experts in consecutive equal parts over the ranks of a group, each perhaps a part over tensor parallel ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        tensor_group: dist.ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
        sliced: Sliced = "none",
        chunks: int = 1,
    ) -> None:
        """``group``: over ``ep``; ``tensor_group``: over ``tp``, whose ranks hold parts of each expert. None for one
        rank. ``sequence_parallel``: hand on this rank's part of the sequence only. ``sliced``: which rows are sent in
        slices. ``chunks``: as of :class:`~nxdt_core.engine.expert.ExchangingDispatcher`."""
        super().__init__(group, chunks)
        self.tensor_group = tensor_group
        self.sequence_parallel = sequence_parallel
        self.sliced = sliced

    def forward(self, hidden: torch.Tensor, routing: Routing, experts: nn.Module) -> torch.Tensor:
        """Compute :meth:`LocalDispatcher.forward`, over the ranks of both groups."""
        tensor_group = self.tensor_group
        sliced = self.sliced == "all" or (self.sliced == "capacity" and routing.capacity is not None)
        if not sliced or tensor_group is None or hidden.shape[-1] % tensor_group.size():
            return super().forward(hidden, routing, experts)
        width = hidden.shape[-1] // tensor_group.size()

        def of_slices(rows: torch.Tensor, *groups: RowGroups) -> torch.Tensor:
            partial = experts(gather_along(rows, -1, tensor_group), *groups)
            return reduce_scatter_along(partial, -1, tensor_group)

        features = hidden.narrow(-1, tensor_group.rank() * width, width)
        mixed = self.mixed(features.flatten(0, 1), routing, cast(nn.Module, of_slices)).view_as(features)
        low_precision = mixed.to(compute_dtype(mixed))
        if not self.sequence_parallel:
            return gather_whole(low_precision, -1, tensor_group).to(mixed.dtype)
        # This rank's part of the sequence with all features, from its slice of the features of the whole sequence.
        ranks, (batch, seq, _) = tensor_group.size(), low_precision.shape
        parts = low_precision.view(batch, ranks, -1, width).transpose(0, 1)  # [ranks, batch, seq / ranks, width]
        splits = [batch * seq // ranks] * ranks
        arrived = all_to_all(parts.flatten(0, 2), splits, splits, tensor_group, equal=True)
        return arrived.view(ranks, batch, -1, width).permute(1, 2, 0, 3).flatten(2).to(mixed.dtype)

    def finish(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the tensor parallel ranks computed, whole or this rank's part of the sequence."""
        if self.tensor_group is None:
            return mixed
        low_precision = mixed.to(compute_dtype(mixed))  # as the product of a matrix that the ranks share
        prefetch_block_input(self, low_precision)
        return sum_over_ranks(low_precision, self.tensor_group, sequence_parallel=self.sequence_parallel).to(
            mixed.dtype
        )


def apply_token_shuffle(module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, *, ranks: int) -> None:
    """Let each mixture of experts see the tokens of ``ranks`` neighbouring data parallel ranks mixed, while it trains.

    Collective: every rank of every pipeline stage calls it. Call it after tensor parallelism, whose block entries
    must see the tokens that were mixed already: under sequence parallelism each rank exchanges its part alone.

    Args:
        module: one pipeline stage, changed in place.
        plan: the mixtures are the tensor blocks around its expert dispatchers.
        mesh: ``ranks`` divides its ``dp_shard``.
        ranks: 1 changes nothing.
    """
    if ranks == 1:
        return
    mesh.split_dp(ranks)
    group = mesh.group("token_shuffle")
    assert group is not None

    def mix(part: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (exchange_tokens(args[0], group), *args[1:]) if part.training else args

    def undo(part: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return exchange_tokens(output, group) if part.training else output

    dispatchers = modules_at(module, plan.experts.dispatchers)
    for path, part in modules_at(module, plan.tensor_blocks).items():
        if any(inner.startswith(f"{path}.") for inner in dispatchers):
            part.register_forward_pre_hook(mix, prepend=True)
            part.register_forward_hook(undo)


def exchange_tokens(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tokens that this rank gets, of ``hidden`` [batch, seq, hidden] on each of n ranks; the same shape.

    Token ``n · i + j`` of rank r becomes token ``n · i + r`` of rank j. Dealing twice undoes it.

    Raises:
        ValueError: the ranks do not divide the tokens.
    """
    ranks = group.size()
    count, width = hidden.shape[:-1].numel(), hidden.shape[-1]
    if count % ranks:
        raise ValueError(f"{count} tokens do not divide over the {ranks} ranks that exchange them")
    by_rank = hidden.reshape(-1, ranks, width).transpose(0, 1)
    splits = [count // ranks] * ranks
    arrived = all_to_all(by_rank.flatten(0, 1), splits, splits, group, equal=True)
    return arrived.view(ranks, -1, width).transpose(0, 1).reshape(hidden.shape)


def exchange_padding(padding: torch.Tensor, mesh: ParallelMesh, *, parts: int) -> torch.Tensor:
    """Return which of the tokens that this rank gets are padding, of ``padding`` bool [batch, seq] on each of n ranks.

    ``parts``: of each sequence, whose tokens are exchanged separately.
    """
    group = mesh.group("token_shuffle")
    assert group is not None
    numbers = padding.unsqueeze(-1).byte()
    return torch.cat([exchange_tokens(part, group) for part in numbers.chunk(parts, 1)], 1).squeeze(-1).bool()


def apply_expert_parallel(
    module: nn.Module,
    plan: ParallelPlan,
    mesh: ParallelMesh,
    *,
    sequence_parallel: bool = False,
    sliced: Sliced = "none",
) -> None:
    """Shard the experts of a stage, in place, and fill the slots of dispatchers and routers.

    Models with experts need it under ``tp`` and ``cp``, too. Not collective; with one rank along all three nothing
    changes.

    Args:
        module: one pipeline stage, mostly on the meta device; values of a real one are kept.
        plan: patterns that match nothing here belong to other stages.
        mesh: its ``ep``, ``tp`` and ``cp`` ranks share experts and tokens.
        sequence_parallel: cut activations outside the tensor blocks along the sequence.
        sliced: what each tensor parallel rank sends a slice of the features of over ``ep``.

    Raises:
        ModelWithoutExperts: there is nothing to share out over ``ep``.
        ExpertsDoNotDivide, ShardDoesNotDivide: sizes that the ranks cannot share in equal parts.
        TensorPlanUnusable: the plan does not say how ``tp`` cuts a parameter.
    """
    if mesh.size("ep") > 1 and not plan.experts.modules:
        raise ModelWithoutExperts(ep=mesh.size("ep"))
    if mesh.size("ep") == mesh.size("tp") == mesh.size("cp") == 1:
        return
    for path, experts in modules_at(module, plan.experts.modules).items():
        for name, parameter in list(experts.named_parameters()):
            cuts = _sharded_dims(path, name, experts, plan, mesh)
            if cuts:  # this rank's part, cloned, so that the whole can go
                local = parameter.detach()
                for dim, along in cuts.items():
                    local = local.chunk(mesh.size(dim), along)[mesh.rank(dim)]
                local = local.clone(memory_format=torch.contiguous_format)
                sharded = shard_over_mesh(local, mesh.mesh(*cuts), *cuts.values())
                owner, _, leaf = name.rpartition(".")
                shard = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
                setattr(experts.get_submodule(owner), leaf, shard)
        experts.local = local_part
        experts.shares = mesh.size("tp")
        for name, update in experts.named_modules():
            if isinstance(update, Update):
                update.local = local_part
                matrix = f"{path}.{name.rpartition('.')[2]}"
                sides = [side for pattern, side in plan.experts.tensor.items() if matches(pattern, matrix)]
                for dropout in (part for part in update.modules() if isinstance(part, Dropout)):
                    dropout.whole = "column" in sides  # its rows have all features
    for path, chunks in exchange_chunks(module, plan).items():
        dispatcher = AllToAllDispatcher(
            mesh.group("ep"),
            mesh.group("tp"),
            sequence_parallel=sequence_parallel,
            sliced=sliced if mesh.size("ep") > 1 else "none",
            chunks=chunks,
        )
        module.set_submodule(path, dispatcher)
    for router in modules_at(module, plan.experts.routers).values():
        # Tensor parallel ranks route the same tokens each for itself.
        group, copies = mesh.group("cp"), mesh.size("tp")
        shards = WholeMicroBatch(copies=copies) if group is None else ZigZagTokens(group=group, copies=copies)
        router.shards = shards


def exchange_chunks(module: nn.Module, plan: ParallelPlan) -> dict[str, int]:
    """Return in how many parts each layer with experts is to send its tokens, by path of the dispatcher."""
    return {p: int(getattr(module.get_submodule(p), "chunks", 1)) for p in modules_at(module, plan.experts.dispatchers)}


def _sharded_dims(
    path: str, name: str, experts: nn.Module, plan: ParallelPlan, mesh: ParallelMesh
) -> dict[Dimension, int]:
    """Return each mesh dimension along which a parameter is cut, and the dimension of the parameter that is cut."""
    ep, tp, parameter = mesh.size("ep"), mesh.size("tp"), experts.get_parameter(name)
    cuts: dict[Dimension, int] = {}
    if ep > 1:
        if len(parameter) % ep:
            raise ExpertsDoNotDivide(module=path, experts=len(parameter), ep=ep)
        cuts["ep"] = 0
    if tp > 1:
        # A parameter of an update belongs to a matrix, with which it shares one dimension, or none: -1.
        owner, _, leaf = name.rpartition(".")
        update, matrix, shared_dim = experts.get_submodule(owner), name, None
        if isinstance(update, Update):
            matrix, shared_dim = owner.rpartition(".")[2], update.sharded_like.get(leaf, -1)
        full_name = f"{path}.{matrix}"
        side = next((side for pattern, side in plan.experts.tensor.items() if matches(pattern, full_name)), None)
        if side is None:
            raise TensorPlanUnusable(problem=f"experts.tensor does not say how '{full_name}' is cut")
        dim = _SHARDED_DIM[side]
        if shared_dim in (None, dim) and dim < parameter.ndim:
            if parameter.shape[dim] % tp:
                features = "output features" if side == "column" else "input features"
                raise ShardDoesNotDivide(module=full_name, size=parameter.shape[dim], features=features, tp=tp)
            cuts["tp"] = dim
    return cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class ZigZagTokens:
    """Each rank of ``group`` holds two chunks of every sequence, as :mod:`~nxdt_core.engine.context.blocks` deals."""

    group: dist.ProcessGroup
    copies: int = 1
    """Processes that compute the router on the same tokens and whose gradients are summed."""
    segments: int = 2

    @property
    def shards(self) -> int:
        """Ranks that share each sequence."""
        return self.group.size()

    def count(self, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the counts of :meth:`TokenShards.count` by one all-gather of 16 bytes for each expert, row and
        rank."""
        ranks = self.group.size()
        by_rank = gather_along(counts, 0, self.group).chunk(ranks)
        chunks = zigzag_unshard(by_rank, 1)  # [batch, 2 * ranks, experts]
        mine = list(zigzag_chunks(self.group.rank(), ranks))
        return exclusive_cumsum(chunks)[:, mine], chunks.sum((0, 1))


def routers_of(whole: nn.Module, plan: ParallelPlan) -> dict[str, int]:
    """Return the number of experts of each router that keeps statistics, by path, in the order of the whole model."""
    return {
        path: int(part.experts)
        for path, part in modules_at(whole, plan.experts.routers).items()
        if hasattr(part, "statistics")
    }


class RouterMetrics:
    """Adds up the statistics of this process's routers, and computes metrics from the sums of all processes.

    Statistics are read when a stage's forward ends, which recomputation does not repeat. Nothing leaves the device.

    Args:
        routers: of the whole model, as :func:`routers_of` gives them.
        stages: the pipeline stages of this process.
        device: on which the stages run and the sums are kept.
        dtype: float32, or float64 where gradients have it.
    """

    def __init__(
        self, routers: Mapping[str, int], stages: Sequence[nn.Module], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._rows = {path: row for row, path in enumerate(routers)}
        self._stages = stages if routers else ()
        experts = torch.tensor(list(routers.values()), dtype=torch.int64).unsqueeze(1)  # [routers, 1]
        widest = max(routers.values(), default=0)
        self._no_expert = (torch.arange(widest) >= experts).to(device)
        self._experts = experts.to(device=device, dtype=dtype)
        self.sums = torch.zeros(len(routers), widest + _STATISTICS, device=device, dtype=dtype)
        """[routers, columns]; they add up over data, context and pipeline parallel ranks, tensor parallel ones have
        copies."""

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count, from zero on, what runs forward within the block."""
        self.sums.zero_()
        hooks = [stage.register_forward_hook(self._count) for stage in self._stages]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def metrics(self, sums: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scalars from the :attr:`sums` of all processes, added up; none where the model has no routers.

        ``expert_load_max`` and ``expert_load_min``: assignments of the busiest and of the idlest expert of all layers,
        in multiples of an equal share; ``expert_load_layer_max``: the mean over layers of each one's busiest.
        ``dropped_tokens``: share of the assignments that exceeded the capacity. ``router_entropy``: mean over layers
        and tokens in nats, ``ln(experts)`` where all experts are equally likely.
        """
        if not self._rows:
            return {}
        assigned, dropped, entropy, tokens = torch.split(sums, [sums.shape[1] - _STATISTICS, 1, 1, 1], dim=1)
        total = assigned.sum(1, keepdim=True)
        loads = assigned * (self._experts / total)
        busiest = loads.amax(1)
        return {
            "expert_load_max": busiest.max(),
            "expert_load_layer_max": busiest.mean(),
            "expert_load_min": loads.masked_fill(self._no_expert, math.inf).min(),
            "dropped_tokens": dropped.sum() / total.sum(),
            "router_entropy": (entropy / tokens).mean(),
        }

    @torch.no_grad()
    def _count(self, stage: nn.Module, arguments: Any, output: Any) -> None:
        for path, part in stage.named_modules():
            row = self._rows.get(path)
            if row is None:
                continue
            statistics = part.statistics
            missing = self.sums.shape[1] - _STATISTICS - len(statistics.assigned)
            metrics = torch.stack((statistics.dropped, statistics.entropy, statistics.tokens))
            self.sums[row] += torch.cat((functional.pad(statistics.assigned, (0, missing)), metrics))
