"""Tensor and sequence parallel models follow one process: losses of some steps and every gradient, in float64."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from nxdt_plugin_llama.builder import LlamaBuilder
from nxdt_plugin_llama.config import LlamaConfig
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from nxdt_core.builtins.objective_causal_lm import CausalLM
from nxdt_core.nn.attention import CausalAttention
from nxdt_core.nn.loss import vocabulary_loss
from nxdt_core.nn.norm import RMSNorm
from nxdt_core.parallel.mesh import ParallelMesh
from nxdt_core.parallel.padding import padded_parameters, real_part
from nxdt_core.parallel.placement import Box, box_of, local_of
from nxdt_core.parallel.tensor import apply_tensor_parallel, partial_parameters, replicated_partials
from nxdt_core.parallel.vocabulary import vocabulary_parallel_cross_entropy_sum
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import AttentionHeads, ParallelPlan
from nxdt_core.testing.ranks import process_group

VOCAB, HIDDEN, SEQ, BATCH, STEPS, LR = 48, 32, 16, 2, 3, 0.3


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
    skip_sums: tuple[str, ...] = field(default=())
    """Mutant: names of parameters whose partial gradients are not summed."""


class Attention(nn.Module):
    """Grouped heads with biases, and a norm of each head: its scale is replicated, its gradient partial."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        size = 8
        self.size = size
        self.query = nn.Linear(HIDDEN, heads * size)
        self.key = nn.Linear(HIDDEN, kv_heads * size)
        self.value = nn.Linear(HIDDEN, kv_heads * size)
        self.head_norm = RMSNorm(size)
        self.core = CausalAttention()
        self.out = nn.Linear(heads * size, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(hidden).unflatten(-1, (-1, self.size)) for p in (self.query, self.key, self.value))
        q, k = self.head_norm(q), self.head_norm(k)
        return self.out(self.core(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """With biases, and a side path of low rank: ``wide`` comes after the sum over ranks that ``narrow`` ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.narrow = nn.Linear(2 * HIDDEN, 4, bias=False)
        self.wide = nn.Linear(4, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = functional.gelu(self.up(hidden))
        return self.down(wide) + self.wide(self.narrow(wide))


class Biased(nn.Module):
    """What Llama lacks: biases everywhere, learned positions, a padding id, norms of heads, a side path."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN, padding_idx=VOCAB - 1)
        self.positions = nn.Embedding(SEQ, HIDDEN)
        self.norm_1, self.norm_2, self.norm_3 = (nn.LayerNorm(HIDDEN) for _ in range(3))
        self.attention = Attention(heads, kv_heads)
        self.mlp = FeedForward()
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]).expand_as(ids))
        hidden = hidden + self.attention(self.norm_1(hidden))
        hidden = hidden + self.mlp(self.norm_2(hidden))
        return self.head(self.norm_3(hidden))


def biased_plan(heads: int, kv_heads: int) -> ParallelPlan:
    return ParallelPlan(
        tensor={
            "tokens": "vocab_embedding",
            "positions": "replicate",
            "attention.query": "column",
            "attention.key": "column",
            "attention.value": "column",
            "attention.out": "row",
            "mlp.up": "column",
            "mlp.down": "row",
            "mlp.narrow": "row",
            "mlp.wide": "replicate",
            "head": "vocab_head",
        },
        tensor_blocks=("attention", "mlp", "head"),
        heads=AttentionHeads(
            query_heads=heads,
            kv_heads=kv_heads,
            query=("attention.query",),
            key_value=("attention.key", "attention.value"),
            output=("attention.out",),
        ),
    )


def built(case: Case) -> tuple[nn.Module, ParallelPlan]:
    """Module on the meta device and plan."""
    with torch.device("meta"):
        if case.model == "biased":
            return Biased(case.heads, case.kv_heads).double(), biased_plan(case.heads, case.kv_heads)
        config = LlamaConfig(
            num_layers=2,
            hidden_size=HIDDEN,
            ffn_hidden_size=2 * HIDDEN,
            num_attention_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=8,
            vocab_size=VOCAB,
            max_position_embeddings=SEQ,
            share_embeddings_and_output_weights=case.tied,
        )
        builder = LlamaBuilder(config)
        return builder.build().double(), builder.plan()


def own_part(name: str, tensor: torch.Tensor, padded) -> tuple[Box, torch.Tensor]:
    """This rank's real elements and their place in the whole parameter."""
    return real_part(tensor, padded[name]) if name in padded else (box_of(tensor), local_of(tensor))


@torch.no_grad()
def materialised(module: nn.Module, plan: ParallelPlan, padded) -> nn.Module:
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
        box, elements = own_part(name, parameter, padded)
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(box.whole, generator=generator, dtype=torch.float64) * 0.3
        elements.copy_(within(box, whole))
    return module


def within(box: Box, whole: torch.Tensor) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


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
    gradients: dict[str, tuple[Box, torch.Tensor]]
    elements: dict[str, int]
    """Held by this rank, by parameter."""
    odd: list[str]
    """Parameters whose gradient lies otherwise than they do, or whose padding is not zero any more."""


def many_processes(case: Case) -> Outcome:
    with process_group():
        mesh = ParallelMesh.build(MeshSizes(tp=case.tp, dp_shard=case.dp), "cpu")
        module, plan = built(case)
        apply_tensor_parallel(module, plan, mesh, sequence_parallel=case.sequence_parallel, pad_heads=case.pad_heads)
        sums = partial_parameters(module, plan, sequence_parallel=case.sequence_parallel)
        copies, padded = replicated_partials(module), padded_parameters(module)
        if case.dp > 1:
            for part in ("attention", "mlp", ""):
                shard = fully_shard(module.get_submodule(part), mesh=mesh.mesh("fsdp"))
                shard.set_gradient_divide_factor(1.0)
                shard.set_force_sum_reduction_for_comms(True)
        materialised(module, plan, padded)

        def sum_partials() -> None:
            for name, parameter in module.named_parameters():
                for names, dim in ((sums, "tp"), (copies, "tp_kv_replica")):
                    if name in names and name not in case.skip_sums:
                        dist.all_reduce(local_of(parameter.grad), group=mesh.group(dim))

        rows = slice(None) if case.dp == 1 else slice(mesh.rank("fsdp"), mesh.rank("fsdp") + 1)
        with vocabulary_loss(vocabulary_parallel_cross_entropy_sum):
            losses, grads = trained(module, batch_of(case, rows), batch_of(case), sum_partials)
        total = torch.tensor(losses, dtype=torch.float64)
        if case.dp > 1:
            dist.all_reduce(total, group=mesh.group("fsdp"))
        parameters = dict(module.named_parameters())
        return Outcome(
            losses=total.tolist(),
            gradients={name: own_part(name, grad, padded) for name, grad in grads.items()},
            elements={name: local_of(parameter).numel() for name, parameter in parameters.items()},
            odd=[name for name, grad in grads.items() if is_odd(name, parameters[name], grad, padded)],
        )


def is_odd(name: str, parameter: nn.Parameter, grad: torch.Tensor, padded) -> bool:
    if isinstance(parameter, DTensor) and (not isinstance(grad, DTensor) or grad.placements != parameter.placements):
        return True
    return any(
        local_of(tensor).count_nonzero() != own_part(name, tensor, padded)[1].count_nonzero()
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
        for name, (box, grad) in outcome.gradients.items():
            assert box.whole == grads[name].shape
            within(box, missing[name]).zero_()
            gap = (grad - within(box, grads[name])).abs().max().item() if grad.numel() else 0.0
            worst[name] = max(worst.get(name, 0.0), gap)
    assert not any(rest.any() for rest in missing.values()), "some elements are held by no rank"
    return {name: value for name, value in worst.items() if value > 1e-9}


LAYOUTS = {
    "tp2": Case(),
    "tp2 tied": Case(tied=True),
    "tp2 sp": Case(sequence_parallel=True),
    "tp2 sp tied masked": Case(sequence_parallel=True, tied=True, masked=True),
    "tp2 masked weighted": Case(masked=True, weighted=True),
    "tp2 copies of one kv head": Case(kv_heads=1),
    "tp2 biased": Case(model="biased", masked=True),
    "tp2 sp biased": Case(model="biased", sequence_parallel=True, weighted=True),
    "tp4 copies of kv heads": Case(tp=4),
    "tp4 sp copies of kv heads": Case(tp=4, sequence_parallel=True, masked=True),
    "tp4 biased copies": Case(tp=4, model="biased"),
    "tp4 sp biased copies": Case(tp=4, model="biased", sequence_parallel=True, weighted=True),
    "tp2 fsdp2": Case(dp=2, model="biased"),
    "tp2 sp fsdp2": Case(dp=2, model="biased", sequence_parallel=True, masked=True),
    "tp2 fsdp2 copies of one kv head": Case(dp=2, model="biased", kv_heads=1),
    "tp2 one group of zeros": Case(heads=3, kv_heads=3, pad_heads=True),
    "tp2 sp zeros in each group": Case(heads=6, kv_heads=2, tp=4, pad_heads=True, sequence_parallel=True),
    "tp4 groups and copies": Case(heads=3, kv_heads=1, tp=4, pad_heads=True),
    "tp4 biased zeros in each group": Case(heads=6, kv_heads=2, tp=4, model="biased", pad_heads=True),
    "tp4 a rank of zeros": Case(heads=6, kv_heads=3, tp=4, model="biased", pad_heads=True),
    "tp2 fsdp2 zeros in the group": Case(heads=3, kv_heads=1, dp=2, model="biased", pad_heads=True),
}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layout_follows_one_process(case: Case, ranks) -> None:
    outcomes = ranks(case.tp * case.dp).run(many_processes, case)
    assert differences(case, outcomes) == {}
    assert [outcome.odd for outcome in outcomes] == [[]] * len(outcomes)
