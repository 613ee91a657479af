"""Tokens mixed between ranks before experts: an exact inverse, and what one process computes that mixes by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.ranks import process_group
from torch import nn
from torch.distributed.tensor import DTensor

from nxdt_core.engine.expert import apply_expert_parallel, apply_token_shuffle, exchange_tokens
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.tensor.apply import apply_tensor_parallel, partial_parameters
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.layer import MixtureOfExperts
from nxdt_core.models.moe.router import TopKRouter
from nxdt_core.models.random.init import initialize
from nxdt_core.models.step_boundary import at_step_boundary
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ExpertPlan, InitRule, ParallelPlan
from nxdt_core.protocols.step_context import StepContext
from tests.sampling import slow_except

HIDDEN, FFN, EXPERTS, BATCH, SEQ = 8, 12, 4, 2, 12
TOKENS = BATCH * SEQ
CLOSE = {"rtol": 1e-9, "atol": 1e-11}

PLAN = ParallelPlan(
    tensor={"lm_head": "vocab_head"},  # on another stage; sequence parallelism asks for one
    tensor_blocks=("moe",),
    experts=ExpertPlan(
        modules=("moe.experts",),
        tensor={"moe.experts.gate_proj": "column", "moe.experts.up_proj": "column", "moe.experts.down_proj": "row"},
        dispatchers=("moe.dispatcher",),
        routers=("moe.router",),
    ),
)


def expert_parameters(model):
    return {name for name, _ in model.named_parameters() if ".experts." in name}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        router = TopKRouter(HIDDEN, EXPERTS, top_k=2, capacity_factor=0.75, balance_coefficient=0.5)
        self.moe = MixtureOfExperts(router=router, experts=SwiGLUExperts(HIDDEN, FFN, EXPERTS))

    def forward(self, hidden):
        return hidden + self.moe(hidden)


def layer():
    model = Layer().double()
    initialize(model.named_parameters(), [InitRule(pattern="*", distribution="normal", std=0.5)], seed=3)
    return model


def inputs(ranks):
    """[ranks, batch, seq, hidden]; a rank's tokens resemble each other, so that by itself it drops most of them."""
    generator = torch.Generator().manual_seed(5)
    own = torch.randn(ranks, 1, 1, HIDDEN, generator=generator, dtype=torch.float64)
    return own + 0.3 * torch.randn(ranks, BATCH, SEQ, HIDDEN, generator=generator, dtype=torch.float64)


def loss_of(output, index):
    return (output * torch.cos(torch.arange(output.numel()).view(output.shape) + index)).sum()


def mixed_by_hand(model, batches, group):
    """Outputs of the ranks' micro-batches, of experts that see ``group`` neighbours mixed; and what is dropped."""
    outputs, dropped = [None] * len(batches), 0
    for first in range(0, len(batches), group):
        flat = [batch.reshape(TOKENS, HIDDEN) for batch in batches[first : first + group]]
        results = torch.empty(group, TOKENS, HIDDEN, dtype=torch.float64)
        for mine in range(group):
            places = [(rank, at + mine) for at in range(0, TOKENS, group) for rank in range(group)]
            tokens = torch.stack([flat[rank][at] for rank, at in places])
            out = model.moe(tokens.view(BATCH, SEQ, HIDDEN)).view(TOKENS, HIDDEN)
            dropped += model.moe.router.statistics.dropped.item()
            ranks, positions = map(list, zip(*places, strict=True))
            results = results.index_put((torch.tensor(ranks), torch.tensor(positions)), out)
        for rank in range(group):
            outputs[first + rank] = batches[first + rank] + results[rank].view(BATCH, SEQ, HIDDEN)
    return outputs, dropped


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_a_rank(sizes, group, sequence_parallel):
    """Output, gradient of the input, whole gradients of the parameters, and what was dropped over all ranks."""
    with process_group():
        mesh = ParallelMesh.build(sizes, "cpu")
        model = layer()
        apply_tensor_parallel(model, PLAN, mesh, sequence_parallel=sequence_parallel)
        apply_expert_parallel(model, PLAN, mesh, sequence_parallel=sequence_parallel)
        apply_token_shuffle(model, PLAN, mesh, ranks=group)
        hidden = inputs(sizes.dp_shard)[mesh.rank("dp_shard")]
        cut = mesh.rank("tp") if sequence_parallel else 0
        parts = sizes.tp if sequence_parallel else 1
        part = hidden.chunk(parts, 1)[cut].clone().requires_grad_()
        with at_step_boundary(StepContext(aux_loss_scale=0.1)):
            output = model(part)
        weights = torch.cos(torch.arange(hidden.numel()).view(hidden.shape) + mesh.rank("dp_shard"))
        (output * weights.chunk(parts, 1)[cut]).sum().backward()
        dropped = model.moe.router.statistics.dropped.clone()
        dist.all_reduce(dropped)
        experts = expert_parameters(model)
        partial = partial_parameters(model, PLAN, sequence_parallel=sequence_parallel)
        for name, parameter in model.named_parameters():
            for dim in ("efsdp" if name in experts else "fsdp", *(("tp",) if name in partial else ())):
                if mesh.group(dim) is not None:
                    dist.all_reduce(local(parameter.grad), group=mesh.group(dim))
        grads = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        return output.detach(), part.grad, grads, dropped.item() // sizes.tp, (mesh.rank("dp_shard"), cut, parts)


LAYOUTS = {
    "two": (MeshSizes(dp_shard=2), 2, False),
    "pairs of four": (MeshSizes(dp_shard=4), 2, False),
    "pairs over ep4": (MeshSizes(dp_shard=4, ep=4), 2, False),
    "ep2-tp2": (MeshSizes(dp_shard=2, tp=2, ep=2), 2, False),
    "ep2-tp2-sp": (MeshSizes(dp_shard=2, tp=2, ep=2), 2, True),
}


@pytest.mark.parametrize(
    ("sizes", "group", "sequence_parallel"),
    slow_except(LAYOUTS.values(), [each for name, each in LAYOUTS.items() if name != "ep2-tp2"]),
    ids=LAYOUTS,
)
def test_ranks_compute_what_one_process_does_that_mixes_by_hand(ranks, sizes, group, sequence_parallel):
    model, batches = layer(), inputs(sizes.dp_shard).requires_grad_()
    with at_step_boundary(StepContext(aux_loss_scale=0.1)):
        outputs, dropped = mixed_by_hand(model, batches, group)
    sum(loss_of(output, index) for index, output in enumerate(outputs)).backward()
    assert dropped > 0
    found = ranks(sizes.world_size).run(on_a_rank, sizes, group, sequence_parallel)
    for output, grad, grads, dropped_there, (dp, cut, parts) in found:
        torch.testing.assert_close(output, outputs[dp].chunk(parts, 1)[cut].detach(), **CLOSE)
        torch.testing.assert_close(grad, batches.grad[dp].chunk(parts, 1)[cut], **CLOSE)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, **CLOSE, msg=lambda text, n=name: f"{n}: {text}")
        assert dropped_there == dropped


def test_mixing_drops_fewer_of_tokens_that_resemble_each_other():
    """Else there would be no use in it."""
    model, batches = layer(), inputs(4)
    drops = [mixed_by_hand(model, batches, group)[1] for group in (1, 2, 4)]
    assert drops[0] > drops[1] > drops[2]


def there_and_back():
    """This rank's tokens before, among the others, and back again, in training and in evaluation."""
    with process_group():
        mesh = ParallelMesh.build(MeshSizes(dp_shard=2), "cpu")
        hidden = 100.0 * dist.get_rank() + torch.arange(6.0).view(1, 6, 1)
        mesh.split_dp(2)
        among = exchange_tokens(hidden, mesh.group("token_shuffle"))
        back = exchange_tokens(among, mesh.group("token_shuffle"))
        model = layer()
        apply_token_shuffle(model, PLAN, mesh, ranks=2)
        batch = inputs(2)[dist.get_rank()]
        plain, evaluated = layer().eval()(batch), model.eval()(batch)
        try:
            exchange_tokens(hidden[:, :5], mesh.group("token_shuffle"))
        except ValueError as error:
            refusal = str(error)
        return among.flatten().tolist(), torch.equal(hidden, back), torch.equal(plain, evaluated), refusal


def test_every_second_token_goes_to_the_other_and_comes_back(ranks):
    first, second = ranks(2).run(there_and_back)
    assert first[0] == [0, 100, 2, 102, 4, 104]
    assert second[0] == [1, 101, 3, 103, 5, 105]
    for _, back, evaluated, refusal in (first, second):
        assert back
        assert evaluated
        assert refusal == "5 tokens do not divide over the 2 ranks that exchange them"
