"""Experts over real ranks against one process on the same micro-batches, in float64: losses, gradients of every
parameter and of the inputs, weights after some steps, statistics, and what each rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.ranks import process_group
from torch import nn
from torch.distributed.tensor import DTensor

from nxdt_core.engine.context.blocks import zigzag_shard, zigzag_unshard
from nxdt_core.engine.expert import apply_expert_parallel
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.tensor.apply import apply_tensor_parallel, partial_parameters
from nxdt_core.models.mlp import SwiGLU
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.layer import MixtureOfExperts
from nxdt_core.models.moe.router import TopKRouter
from nxdt_core.models.random.init import initialize
from nxdt_core.models.step_boundary import at_step_boundary
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ExpertPlan, InitRule, ParallelPlan
from nxdt_core.protocols.step_context import StepContext
from tests.sampling import slow_except

HIDDEN, FFN, EXPERTS, BATCH, SEQ = 8, 12, 4, 2, 16
MICRO_BATCHES, STEPS, WEIGHT, LR = 4, 2, 900.0, 1.5
CAPACITY_FACTORS = (None, 0.75)
CLOSE = {"rtol": 1e-9, "atol": 1e-11}

PLAN = ParallelPlan(
    tensor={
        "*.moe.shared.gate_proj": "column",
        "*.moe.shared.up_proj": "column",
        "*.moe.shared.down_proj": "row",
        "lm_head": "vocab_head",  # on another stage; sequence parallelism asks for one
    },
    tensor_blocks=("*.moe",),
    experts=ExpertPlan(
        modules=("*.moe.experts",),
        tensor={
            "*.moe.experts.gate_proj": "column",
            "*.moe.experts.up_proj": "column",
            "*.moe.experts.down_proj": "row",
        },
        dispatchers=("*.moe.dispatcher",),
        routers=("*.moe.router",),
    ),
)


@dataclass(frozen=True)
class Layout:
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    sliced: str = "none"
    chunks: int = 1

    @property
    def sizes(self):
        return MeshSizes(dp_shard=self.dp, cp=self.cp, tp=self.tp, ep=self.ep)

    def __str__(self):
        sizes = {"dp": self.dp, "cp": self.cp, "tp": self.tp, "ep": self.ep}
        return "-".join(f"{name}{size}" for name, size in sizes.items() if size > 1) + (
            "-sp" * self.sequence_parallel + "-slices" * (self.sliced != "none") + "-chunks" * (self.chunks > 1)
        )


def expert_parameters(model):
    return {name for name, _ in model.named_parameters() if ".experts." in name}


class Layer(nn.Module):
    def __init__(self, capacity_factor):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(HIDDEN))
        self.moe = MixtureOfExperts(
            router=TopKRouter(
                HIDDEN,
                EXPERTS,
                top_k=2,
                normalize=True,
                capacity_factor=capacity_factor,
                balance_coefficient=0.5,
                z_coefficient=0.05,
            ),
            experts=SwiGLUExperts(HIDDEN, FFN, EXPERTS),
            shared=SwiGLU(HIDDEN, 6),
        )

    def forward(self, hidden):
        return hidden + self.moe(hidden * self.scale)


def two_layers(capacity_factor):
    model = nn.Sequential(Layer(capacity_factor), Layer(capacity_factor)).double()
    initialize(model.named_parameters(), [InitRule(pattern="*", distribution="normal", std=0.5)], seed=3)
    return model


def micro_batches(count=MICRO_BATCHES):
    """(inputs, targets); the loss is half the square of their difference, summed."""
    generator = torch.Generator().manual_seed(5)
    mixing = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
    inputs = torch.randn(count, BATCH, SEQ, HIDDEN, generator=generator, dtype=torch.float64)
    return [torch.stack((tokens, tokens @ mixing)) for tokens in inputs]


def step(model, inputs, targets):
    """Gradients of one micro-batch's share of the step's loss; returns that share without auxiliary losses."""
    with at_step_boundary(StepContext(aux_loss_scale=1 / WEIGHT)):
        output = model(inputs)
    loss = 0.5 * (output - targets).square().sum() / WEIGHT
    loss.backward()
    return loss.detach()


def statistics(model):
    found = [module.statistics for module in model.modules() if isinstance(module, TopKRouter)]
    return torch.stack([torch.cat((s.assigned, s.dropped[None], s.entropy[None])) for s in found])


def train(model, batches, reduce, rank_part, total):
    """Losses and statistics of each step, and of the last one the gradients of parameters and inputs."""
    losses, counts, input_grads = [], [], []
    for _ in range(STEPS):
        model.zero_grad()
        loss, count, input_grads = 0.0, 0.0, []
        for inputs, targets in batches:
            part = rank_part(inputs).clone().requires_grad_()
            loss = loss + step(model, part, rank_part(targets))
            count = count + statistics(model)
            input_grads.append(part.grad)
        reduce(model)
        losses.append(total(loss))
        counts.append(count)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
    return losses, counts, input_grads


def alone(capacity_factor):
    model = two_layers(capacity_factor)
    losses, counts, input_grads = train(
        model, micro_batches(), lambda model: None, lambda tensor: tensor, lambda loss: loss
    )
    return model, losses, counts, input_grads


def on_ranks(layout):
    """What one rank has in the end, everything whole, for each capacity factor."""
    with process_group():
        mesh = ParallelMesh.build(layout.sizes, "cpu")
        return {factor: on_a_rank(layout, mesh, factor) for factor in CAPACITY_FACTORS}


def on_a_rank(layout, mesh, capacity_factor):
    model = two_layers(capacity_factor)
    for layer in model:
        layer.moe.dispatcher.chunks = layout.chunks
    apply_tensor_parallel(model, PLAN, mesh, sequence_parallel=layout.sequence_parallel)
    apply_expert_parallel(model, PLAN, mesh, sequence_parallel=layout.sequence_parallel, sliced=layout.sliced)
    held = {name: local(p).numel() for name, p in model.named_parameters()}
    losses, counts, input_grads = train(
        model,
        micro_batches()[mesh.rank("dp_shard") :: layout.dp],
        lambda model: reduce_gradients(model, mesh, layout),
        lambda tensor: part_of(tensor, mesh, layout),
        lambda loss: total(loss, layout),
    )
    for count in counts:
        dist.all_reduce(count)
    grads = {name: whole(p.grad) for name, p in model.named_parameters()}
    weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
    return losses, counts, [whole_input(grad, mesh, layout) for grad in input_grads], grads, weights, held


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor, mesh, layout):
    if layout.cp > 1:
        tensor = zigzag_shard(tensor, mesh.rank("cp"), layout.cp, 1)
    return tensor.chunk(layout.tp, 1)[mesh.rank("tp")] if layout.sequence_parallel else tensor


def gathered(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def whole_input(grad, mesh, layout):
    if layout.sequence_parallel:
        grad = torch.cat(gathered(grad, mesh.group("tp")), 1)
    return zigzag_unshard(gathered(grad, mesh.group("cp")), 1) if layout.cp > 1 else grad


def total(loss, layout):
    """Over all ranks; without sequence parallelism the tensor parallel ones have equal losses."""
    loss = loss.clone() if layout.sequence_parallel else loss / layout.tp
    dist.all_reduce(loss)
    return loss


def reduce_gradients(model, mesh, layout):
    """By the rules of the design: over ranks with the same parameters, and over tp where a gradient is partial."""
    experts = expert_parameters(model)
    partial = partial_parameters(model, PLAN, sequence_parallel=layout.sequence_parallel)
    assert layout.tp == 1 or not experts & partial
    for name, parameter in model.named_parameters():
        groups = [mesh.group("efsdp" if name in experts else "fsdp")]
        if name in partial:
            groups.append(mesh.group("tp"))
        for group in groups:
            if group is not None:
                dist.all_reduce(local(parameter.grad), group=group)


LAYOUTS = [
    Layout(dp=2, ep=2),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2),
    Layout(cp=2, ep=2),
    Layout(dp=2, tp=2, ep=2),
    Layout(dp=2, tp=2, ep=2, sequence_parallel=True),
    Layout(dp=2, cp=2, ep=4),
    Layout(cp=2, tp=2, ep=2, sequence_parallel=True),
    Layout(dp=4, ep=2),
    Layout(dp=2, tp=2, ep=2, sliced="all"),
    Layout(dp=2, tp=2, ep=2, sequence_parallel=True, sliced="all"),
    Layout(cp=2, tp=2, ep=2, sequence_parallel=True, sliced="all"),
    Layout(dp=2, tp=2, ep=2, sequence_parallel=True, sliced="all", chunks=3),
]


KEPT = (LAYOUTS[0], LAYOUTS[2], LAYOUTS[4], LAYOUTS[-3])
"""Experts over data and context parallel ranks, with sequence parallelism and without."""


@pytest.fixture(scope="module")
def references():
    return {factor: alone(factor) for factor in CAPACITY_FACTORS}


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, KEPT), ids=str)
def test_a_layout_trains_as_one_process_does(ranks, references, layout):
    for rank, found in enumerate(ranks(layout.sizes.world_size).run(on_ranks, layout)):
        for factor, results in found.items():
            assert_equal_to_one_process(layout, rank, results, references[factor])


def assert_equal_to_one_process(layout, rank, found, reference):
    model, losses, counts, input_grads = reference
    found_losses, found_counts, found_input_grads, grads, weights, held = found
    torch.testing.assert_close(found_losses, losses, **CLOSE)
    torch.testing.assert_close(found_counts, [layout.tp * count for count in counts], **CLOSE)
    mine = input_grads[rank // (layout.tp * layout.cp) :: layout.dp]
    torch.testing.assert_close(found_input_grads, mine, **CLOSE)
    experts = expert_parameters(model)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, **CLOSE, msg=lambda text, n=name: f"{n}: {text}")
        torch.testing.assert_close(weights[name], parameter.detach(), **CLOSE)
        if name in experts:
            assert held[name] * layout.ep * layout.tp == parameter.numel()


def test_the_reference_learns_and_drops(references):
    """Else the comparisons above would prove little."""
    for factor, (_, losses, counts, _) in references.items():
        assert losses[-1] < 0.95 * losses[0]
        dropped = torch.stack(counts)[:, :, EXPERTS]
        assert (dropped > 0).all() if factor else (dropped == 0).all()


@torch.no_grad()
def crowd(model):
    """Positive tokens now choose the first two experts."""
    model[0].scale.abs_()
    model[0].moe.router.weight[:2] += 100


def unequal_ranks():
    """Rank 1 has a quarter of the tokens, and in the second round all tokens choose the experts of rank 0."""
    with process_group():
        mesh = ParallelMesh.build(MeshSizes(dp_shard=2, ep=2), "cpu")
        model = two_layers(None)
        apply_expert_parallel(model, PLAN, mesh)
        results = []
        for crowded in (False, True):
            if crowded:
                crowd(model)
            inputs, targets = micro_batches(2)[mesh.rank("dp_shard")].abs()
            seq = SEQ // 4 if mesh.rank("dp_shard") else SEQ
            model.zero_grad()
            step(model, inputs[:, :seq], targets[:, :seq])
            results.append({name: whole(p.grad) for name, p in model.named_parameters() if "experts" in name})
        return results


def test_ranks_may_have_unequal_tokens_or_none_at_all(ranks):
    model = two_layers(None)
    found = ranks(2).run(unequal_ranks)
    for turn in range(2):
        if turn == 1:
            crowd(model)
        model.zero_grad()
        for rank, batch in enumerate(micro_batches(2)):
            inputs, targets = batch.abs()
            seq = SEQ // 4 if rank else SEQ
            step(model, inputs[:, :seq], targets[:, :seq])
        for grads in (found[0][turn], found[1][turn]):
            for name, grad in grads.items():
                torch.testing.assert_close(grad, model.get_parameter(name).grad, **CLOSE)
    assert model[0].moe.experts.up_proj.grad[2:].abs().max() == 0


def on_meta():
    with process_group():
        mesh = ParallelMesh.build(MeshSizes(dp_shard=2, tp=2, ep=2), "cpu")
        with torch.device("meta"):
            model = nn.Sequential(Layer(None))
        apply_tensor_parallel(model, PLAN, mesh, sequence_parallel=True)
        apply_expert_parallel(model, PLAN, mesh, sequence_parallel=True)
        names = expert_parameters(model)
        parameters = {name: p for name, p in model.named_parameters() if name in names}
        assert all(p.to_local().is_meta and p.requires_grad for p in parameters.values())
        return {n: (tuple(p.shape), tuple(p.to_local().shape), str(p.placements)) for n, p in parameters.items()}


def test_it_works_on_the_meta_device(ranks):
    found = ranks(4).run(on_meta)
    assert (
        found
        == [
            {
                "0.moe.experts.gate_proj": ((4, 12, 8), (2, 6, 8), "(Shard(dim=0), Shard(dim=1))"),
                "0.moe.experts.up_proj": ((4, 12, 8), (2, 6, 8), "(Shard(dim=0), Shard(dim=1))"),
                "0.moe.experts.down_proj": ((4, 8, 12), (2, 8, 6), "(Shard(dim=0), Shard(dim=2))"),
            }
        ]
        * 4
    )
