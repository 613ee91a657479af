"""Tensor and sequence parallel models follow one process: losses of some steps and every gradient, in float64."""

from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from nxdt_core.builtins.objective_causal_lm import CausalLM
from nxdt_core.nn.attention import CausalAttention
from nxdt_core.nn.loss import vocabulary_loss
from nxdt_core.nn.norm import RMSNorm
from nxdt_core.parallel.mesh import ParallelMesh
from nxdt_core.parallel.placement import box_of, local_of
from nxdt_core.parallel.tensor import apply_tensor_parallel, partial_parameters, replicated_partials
from nxdt_core.parallel.vocabulary import vocabulary_parallel_cross_entropy_sum
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import AttentionHeads, ParallelPlan
from nxdt_core.testing.ranks import process_group
from nxdt_plugin_llama.builder import LlamaBuilder
from nxdt_plugin_llama.config import LlamaConfig

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
    masked: bool = False
    weighted: bool = False
    skip_sums: tuple[str, ...] = field(default=())
    """Mutant: names of parameters whose partial gradients are not summed."""


class Attention(nn.Module):
    """Grouped heads with biases, and a norm of each head: its scale is replicated, its gradient partial."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        size = HIDDEN // heads
        self.size = size
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, kv_heads * size)
        self.value = nn.Linear(HIDDEN, kv_heads * size)
        self.head_norm = RMSNorm(size)
        self.core = CausalAttention()
        self.out = nn.Linear(HIDDEN, HIDDEN)

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


@torch.no_grad()
def materialised(module: nn.Module, plan: ParallelPlan) -> nn.Module:
    """Allocated, with values that depend on each element's place in the whole parameter only."""
    module.to_empty(device="cpu")
    for owner, user in plan.tied:
        path, _, leaf = user.rpartition(".")
        setattr(module.get_submodule(path), leaf, module.get_parameter(owner))
    for part in module.modules():
        if hasattr(part, "reset_buffers"):
            part.reset_buffers()
    for number, (_, parameter) in enumerate(module.named_parameters()):
        box = box_of(parameter)
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(box.whole, generator=generator, dtype=torch.float64) * 0.3
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            whole = whole.narrow(dim, offset, size)
        local_of(parameter).copy_(whole)
    return module


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
    materialised(module, plan)
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


def many_processes(case: Case):
    """On every rank: losses, whole gradients, and the elements that it holds."""
    with process_group():
        sizes = MeshSizes(tp=case.tp, dp_shard=case.dp)
        mesh = ParallelMesh.build(sizes, "cpu")
        module, plan = built(case)
        apply_tensor_parallel(module, plan, mesh, sequence_parallel=case.sequence_parallel)
        sums = partial_parameters(module, plan, sequence_parallel=case.sequence_parallel)
        copies = replicated_partials(module)
        if case.dp > 1:
            for part in ("attention", "mlp", ""):
                shard = fully_shard(module.get_submodule(part), mesh=mesh.mesh("fsdp"))
                shard.set_gradient_divide_factor(1.0)
                shard.set_force_sum_reduction_for_comms(True)
        materialised(module, plan)

        def sum_partials() -> None:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                for names, dim in ((sums, "tp"), (copies, "tp_kv_replica")):
                    if name in names and name not in case.skip_sums:
                        dist.all_reduce(local_of(parameter.grad), group=mesh.group(dim))

        rows = slice(None) if case.dp == 1 else slice(mesh.rank("fsdp"), mesh.rank("fsdp") + 1)
        with vocabulary_loss(vocabulary_parallel_cross_entropy_sum):
            losses, grads = trained(module, batch_of(case, rows), batch_of(case), sum_partials)
        if case.dp > 1:
            total = torch.tensor(losses, dtype=torch.float64)
            dist.all_reduce(total, group=mesh.group("fsdp"))
            losses = total.tolist()
        whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
        return losses, whole, {name: local_of(p).numel() for name, p in module.named_parameters()}


def differences(case: Case, results) -> dict[str, float]:
    """Largest difference from one process, by name; "loss" for the losses."""
    losses, grads = one_process(case)
    worst: dict[str, float] = {"loss": 0.0}
    for rank_losses, rank_grads, _ in results:
        assert rank_grads.keys() == grads.keys()
        worst["loss"] = max(worst["loss"], *(abs(a - b) for a, b in zip(losses, rank_losses, strict=True)))
        for name, grad in grads.items():
            assert rank_grads[name].shape == grad.shape, name
            worst[name] = max(worst.get(name, 0.0), (rank_grads[name] - grad).abs().max().item())
    assert losses[-1] < losses[0]
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
}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layout_follows_one_process(case: Case, ranks) -> None:
    results = ranks(case.tp * case.dp).run(many_processes, case)
    assert differences(case, results) == {}
