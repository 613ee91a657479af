"""Expert parallelism by a model's plan: experts sharded over ``ep``, each over ``tp``; routers and their metrics.

An expert's gradient is a sum over the tokens of all ``ep`` ranks; the ranks of ``efsdp``, which hold the same experts,
have the rest. A router is in a tensor block: its gradient is a partial sum over ``tp``. Metrics of routers are those of
the whole global batch: load of the experts, dropped tokens, entropy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from nxdt_core.distributed.collectives import gather_along
from nxdt_core.distributed.placement import shard_over_mesh
from nxdt_core.engine.context.blocks import zigzag_chunks, zigzag_unshard
from nxdt_core.engine.expert_dispatch import AllToAllDispatcher, Sliced
from nxdt_core.engine.mesh import Dimension, ParallelMesh
from nxdt_core.engine.tensor.layers import local_part
from nxdt_core.errors.launch import ShardDoesNotDivide, TensorPlanUnusable
from nxdt_core.errors.layouts import ExpertsDoNotDivide, ModelWithoutExperts
from nxdt_core.models.moe.router import TokenShards, WholeMicroBatch, exclusive_cumsum
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.models.random.dropout import Dropout
from nxdt_core.models.updates import Update
from nxdt_core.protocols.plan import ParallelPlan

_SHARDED_DIM = {"column": 1, "row": 2}
"""Dimension in which matrices [experts, out, in] are sharded; biases [experts, out] of row-parallel ones are whole."""


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
    for path in expert_modules(module, plan):
        _shard_experts(path, module.get_submodule(path), plan, mesh)
    for path, chunks in exchange_chunks(module, plan).items():
        dispatcher = AllToAllDispatcher(
            mesh.group("ep"),
            mesh.group("tp"),
            sequence_parallel=sequence_parallel,
            sliced=sliced if mesh.size("ep") > 1 else "none",
            chunks=chunks,
        )
        module.set_submodule(path, dispatcher)
    for path in _paths(module, plan.experts.routers):
        module.get_submodule(path).shards = token_shards(mesh)  # type: ignore[assignment]


def exchange_chunks(module: nn.Module, plan: ParallelPlan) -> dict[str, int]:
    """Return in how many parts each layer with experts is to send its tokens, by path of the dispatcher."""
    return {p: int(getattr(module.get_submodule(p), "chunks", 1)) for p in _paths(module, plan.experts.dispatchers)}


def expert_modules(module: nn.Module, plan: ParallelPlan) -> tuple[str, ...]:
    """Return the paths of the modules whose parameters are experts."""
    return tuple(_paths(module, plan.experts.modules))


def _paths(module: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    return [path for path, _ in module.named_modules() if matches_any(patterns, path)]


def _shard_experts(path: str, experts: nn.Module, plan: ParallelPlan, mesh: ParallelMesh) -> None:
    for name, parameter in list(experts.named_parameters()):
        cuts = dict(_sharded_dims(path, name, experts, plan, mesh))
        if cuts:
            owner, _, leaf = name.rpartition(".")
            setattr(experts.get_submodule(owner), leaf, _sharded(parameter, cuts, mesh))
    experts.local = local_part  # type: ignore[assignment]
    experts.shares = mesh.size("tp")  # type: ignore[assignment]
    for name, update in experts.named_modules():
        if not isinstance(update, Update):
            continue
        update.local = local_part
        matrix = f"{path}.{name.rpartition('.')[2]}"
        column = any(side == "column" and matches(pattern, matrix) for pattern, side in plan.experts.tensor.items())
        for dropout in (part for part in update.modules() if isinstance(part, Dropout)):
            dropout.whole = column  # its rows have all features


def _sharded_dims(
    path: str, name: str, experts: nn.Module, plan: ParallelPlan, mesh: ParallelMesh
) -> Iterator[tuple[Dimension, int]]:
    """Yield each mesh dimension along which a parameter is cut, and the dimension of the parameter that is cut."""
    ep, tp, parameter = mesh.size("ep"), mesh.size("tp"), experts.get_parameter(name)
    if ep > 1:
        if len(parameter) % ep:
            raise ExpertsDoNotDivide(module=path, experts=len(parameter), ep=ep)
        yield "ep", 0
    if tp > 1:
        matrix, follows = _followed(experts, name)
        full_name = f"{path}.{matrix}"
        side = next((side for pattern, side in plan.experts.tensor.items() if matches(pattern, full_name)), None)
        if side is None:
            raise TensorPlanUnusable(problem=f"experts.tensor does not say how '{full_name}' is cut")
        dim = _SHARDED_DIM[side]
        if follows not in (None, dim) or dim >= parameter.ndim:
            return
        if parameter.shape[dim] % tp:
            features = "output features" if side == "column" else "input features"
            raise ShardDoesNotDivide(module=full_name, size=parameter.shape[dim], features=features, tp=tp)
        yield "tp", dim


def _followed(experts: nn.Module, name: str) -> tuple[str, int | None]:
    """The matrix that a parameter is or belongs to, and the dimension that it shares with it: None for all, -1 for
    none."""
    owner, _, leaf = name.rpartition(".")
    update = experts.get_submodule(owner)
    if not isinstance(update, Update):
        return name, None
    return owner.rpartition(".")[2], update.follows.get(leaf, -1)


def _sharded(parameter: nn.Parameter, cuts: dict[Dimension, int], mesh: ParallelMesh) -> nn.Parameter:
    """Return this rank's part, a DTensor over the mesh of ``cuts``; cloned, so that the whole can go."""
    local = parameter.detach()
    for dim, along in cuts.items():
        local = local.chunk(mesh.size(dim), along)[mesh.rank(dim)]
    local = local.clone(memory_format=torch.contiguous_format)
    sharded = shard_over_mesh(local, mesh.mesh(*cuts), *cuts.values())
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


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


def token_shards(mesh: ParallelMesh) -> TokenShards:
    """Return what routers need to know of ``mesh``. Tensor parallel ranks route the same tokens each for itself."""
    group = mesh.group("cp")
    if group is None:
        return WholeMicroBatch(copies=mesh.size("tp"))
    return ZigZagTokens(group=group, copies=mesh.size("tp"))


_STATISTICS = 3
"""Columns behind those of the experts: dropped assignments, entropies, tokens."""


def routers_of(whole: nn.Module, plan: ParallelPlan) -> dict[str, int]:
    """Return the number of experts of each router that keeps statistics, by path, in the order of the whole model."""
    return {
        path: int(part.experts)
        for path, part in whole.named_modules()
        if matches_any(plan.experts.routers, path) and hasattr(part, "statistics")
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
