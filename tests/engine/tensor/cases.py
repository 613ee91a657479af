"""Training steps of a small model in one layout, on ranks and in one process, and how far they differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from nxdt_testing.ranks import process_group
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nxdt_core.distributed.placement import local_of, local_shard_of
from nxdt_core.engine.data.gradients import GradientReducer
from nxdt_core.engine.loss import vocabulary_parallel_cross_entropies
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.tensor import apply
from nxdt_core.engine.tensor.layers import PaddedDim, padded_parameters, unpadded_shard
from nxdt_core.models.loss import CausalLM
from nxdt_core.models.step_boundary import at_step_boundary
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.protocols.tensor_shards import LocalShard, TensorSlice
from tests.engine.tensor.models import SEQ, VOCAB, Biased, biased_plan, llama
from tests.engine.tensor.mutants import MUTANTS

BATCH, STEPS, LR = 2, 2, 0.3
Padded = Mapping[str, PaddedDim]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its layout; pickled to the ranks."""

    model: str = "llama"
    heads: int = 4
    kv_heads: int = 2
    tied: bool = False
    tp: int = 2
    dp: int = 1
    sequence_parallel: bool = False
    pad_heads: bool = False
    masked: bool = False
    weighted: bool = False
    mutant: str | None = None
    """An error to make on purpose, of :data:`MUTANTS`."""

    @property
    def world_size(self) -> int:
        return self.tp * self.dp


def built(case: Case) -> tuple[nn.Module, ParallelPlan]:
    """Module on the meta device and plan."""
    with torch.device("meta"):
        if case.model == "biased":
            return Biased(case.heads, case.kv_heads).double(), biased_plan(case.heads, case.kv_heads)
        builder = llama(case.heads, case.kv_heads, tied=case.tied)
        return builder.build().double(), builder.plan()


def own_part(name: str, tensor: torch.Tensor, padded: Padded) -> LocalShard:
    """This rank's real elements and their place in the whole parameter."""
    return unpadded_shard(tensor, padded[name]) if name in padded else local_shard_of(tensor)


@torch.no_grad()
def materialised(module: nn.Module, plan: ParallelPlan, padded: Padded) -> nn.Module:
    """Allocated, with values that depend on each element's place in the whole parameter only."""
    module.to_empty(device="cpu")
    for owner, user in plan.tied:
        path, _, leaf = user.rpartition(".")
        setattr(module.get_submodule(path), leaf, module.get_parameter(owner))
    for part in module.modules():
        if hasattr(part, "reset_buffers"):
            part.reset_buffers()
    for number, (name, parameter) in enumerate(module.named_parameters()):
        local_of(parameter).zero_()
        local = own_part(name, parameter, padded)
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(local.shape, generator=generator, dtype=torch.float64) * 0.3
        local.tensor.copy_(within(local, whole))
    return module


def within(local: LocalShard, whole: torch.Tensor) -> torch.Tensor:
    return whole[local.region.within(TensorSlice.whole(local.shape))]


def batch_of(case: Case, row: slice = slice(None)) -> Batch:
    """The whole batch, repeated at every step; rows of it for a data parallel rank."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    labels = ids[:, 1:].clone()
    if case.masked:
        labels[0, :5] = -100
        labels[1] = -100  # a row without any loss token
    weights = torch.rand(BATCH, SEQ, generator=generator) if case.weighted else None
    return Batch(input_ids=ids[row, :-1], labels=labels[row], loss_weights=None if weights is None else weights[row])


def one_process(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps, and the gradients of the last."""
    module, plan = built(case)
    materialised(module, plan, {})
    return trained(module, batch_of(case), batch_of(case))


def trained(module: nn.Module, batch: Batch, whole: Batch, after_backward=lambda: None):
    losses, grads = [], {}
    objective = CausalLM()
    for _ in range(STEPS):
        module.zero_grad()
        loss = objective(module(batch.input_ids), batch).loss_sum / objective.weight(whole)
        loss.backward()
        after_backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                grads[name] = parameter.grad
                local_of(parameter).sub_(local_of(parameter.grad), alpha=LR)
    return losses, grads


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank has seen."""

    losses: list[float]
    gradients: dict[str, LocalShard]
    elements: dict[str, int]
    """Held by this rank, by parameter."""
    odd: list[str]
    """Parameters whose gradient lies otherwise than they do, or whose padding is not zero any more."""


def on_ranks(cases: Sequence[Case]) -> list[Outcome]:
    """All cases of one world size, one after the other in the same processes."""
    with process_group():
        outcomes = []
        for case in cases:
            with (
                MUTANTS[case.mutant](),
                at_step_boundary(StepContext(vocabulary_loss=vocabulary_parallel_cross_entropies)),
            ):
                outcomes.append(many_processes(case))
        return outcomes


def many_processes(case: Case) -> Outcome:
    mesh = ParallelMesh.build(MeshSizes(tp=case.tp, dp_shard=case.dp), "cpu")
    module, plan = built(case)
    apply.apply_tensor_parallel(module, plan, mesh, sequence_parallel=case.sequence_parallel, pad_heads=case.pad_heads)
    sums = apply.partial_parameters(module, plan, sequence_parallel=case.sequence_parallel)
    padded = padded_parameters(module)
    if case.dp > 1:
        for part in ("attention", "mlp", ""):
            shard = fully_shard(module.get_submodule(part), mesh=mesh.mesh("fsdp"))
            shard.set_gradient_divide_factor(1.0)
            shard.set_force_sum_reduction_for_comms(True)
    materialised(module, plan, padded)

    parameters = dict(module.named_parameters())
    reducer = GradientReducer(parameters, mesh, tensor_partial=sums, data_reduced=case.dp > 1)
    row = mesh.rank("fsdp")
    batch = batch_of(case, slice(row, row + 1)) if case.dp > 1 else batch_of(case)
    losses, grads = trained(module, batch, batch_of(case), reducer.reduce_all)
    total = torch.tensor(losses, dtype=torch.float64)
    if case.dp > 1:
        dist.all_reduce(total, group=mesh.group("fsdp"))
    return Outcome(
        losses=total.tolist(),
        gradients={name: own_part(name, grad, padded) for name, grad in grads.items()},
        elements={name: local_of(parameter).numel() for name, parameter in parameters.items()},
        odd=[name for name, grad in grads.items() if is_odd(name, parameters[name], grad, padded)],
    )


def is_odd(name: str, parameter: nn.Parameter, grad: torch.Tensor, padded: Padded) -> bool:
    if isinstance(parameter, DTensor) and (not isinstance(grad, DTensor) or grad.placements != parameter.placements):
        return True
    return any(
        local_of(tensor).count_nonzero() != own_part(name, tensor, padded).tensor.count_nonzero()
        for tensor in (parameter, grad)
    )


def differences(case: Case, outcomes: list[Outcome]) -> dict[str, float]:
    """Largest difference from one process where it is above 1e-9, by name; "loss" for the losses."""
    losses, grads = one_process(case)
    assert losses[-1] < losses[0]
    worst: dict[str, float] = {"loss": 0.0}
    missing = {name: torch.ones_like(grad) for name, grad in grads.items()}
    for outcome in outcomes:
        assert outcome.gradients.keys() == grads.keys()
        worst["loss"] = max(worst["loss"], *(abs(a - b) for a, b in zip(losses, outcome.losses, strict=True)))
        for name, local in outcome.gradients.items():
            assert local.shape == grads[name].shape
            within(local, missing[name]).zero_()
            grad = local.tensor
            gap = (grad - within(local, grads[name])).abs().max().item() if grad.numel() else 0.0
            worst[name] = max(worst.get(name, 0.0), gap)
    assert not any(rest.any() for rest in missing.values()), "some elements are held by no rank"
    return {name: value for name, value in worst.items() if value > 1e-9}
