"""Pipelines over real processes against one process: losses, every gradient, weights after 20 steps, in float64.

One batch is repeated, so that the loss falls; micro-batches have unequal masks and several documents.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from nxdt_plugin_llama.builder import LlamaBuilder
from nxdt_plugin_llama.config import LlamaConfig
from torch.distributed.tensor import DTensor

from nxdt_core.nn.init import draw, rule_for
from nxdt_core.nn.loss import cross_entropy_sum
from nxdt_core.parallel.data import apply_data_parallel
from nxdt_core.parallel.mesh import ParallelMesh
from nxdt_core.parallel.pipeline import PipelineRunner
from nxdt_core.parallel.stages import cut_stage, stages_of_rank
from nxdt_core.parallel.tied import sum_tied_gradients, tied_copies, tied_group
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.testing.ranks import process_group

VOCAB, HIDDEN, SEQ = 32, 16, 12
STEPS, LR = 20, 0.1
DOUBLE = PrecisionPolicy(name="double", parameters="float64", gradients="float64", reductions="float64")


@dataclass(frozen=True)
class Case:
    """A layout and a model."""

    schedule: str = "1f1b"
    pp: int = 2
    dp_shard: int = 1
    dp_replicate: int = 1
    zero_stage: int = 1
    tied: bool = False
    micro_batches: int = 4
    cuts: tuple[str, ...] | None = None
    steps: int = STEPS

    @property
    def vpp(self):
        return 1 if self.schedule == "1f1b" else 2

    @property
    def sizes(self):
        return MeshSizes(
            pp=self.pp,
            vpp=self.vpp,
            schedule=self.schedule,
            dp_shard=self.dp_shard,
            dp_replicate=self.dp_replicate,
            zero_stage=self.zero_stage,
        )


def builder(case):
    return LlamaBuilder(
        LlamaConfig(
            num_layers=4,
            hidden_size=HIDDEN,
            ffn_hidden_size=24,
            num_attention_heads=4,
            num_kv_heads=2,
            vocab_size=VOCAB,
            max_position_embeddings=64,
            init_method_std=0.3,
            share_embeddings_and_output_weights=case.tied,
        )
    )


def micro_batch(index, rows=2, length=SEQ):
    """Masks differ: micro-batch ``index`` has ``index + 1`` ignored labels a row; rows hold two documents."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(VOCAB, (rows, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, : index + 1] = -100
    documents = (torch.arange(length) >= 4 + index % 4).long().expand(rows, -1).contiguous()
    positions = torch.arange(length) - (4 + index % 4) * documents
    return Batch(input_ids=ids[:, :-1].contiguous(), labels=labels, position_ids=positions, document_ids=documents)


def arguments(batch):
    return {"position_ids": batch.position_ids, "document_ids": batch.document_ids}


def hidden_like(batch):
    return (*batch.input_ids.shape, HIDDEN), torch.float64


def materialise(module, case, tied_owner):
    module.to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_buffers"):
            part.reset_buffers()
    rules = builder(case).init_rules()
    for name, parameter in module.named_parameters():
        name = tied_owner.get(name, name)
        whole = draw(parameter.shape, rule_for(name, rules), name=name, seed=1, dtype=parameter.dtype)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                # The whole is drawn on every rank, and each takes its part.
                local = parameter.to_local()
                offset = sum(chunk.shape[0] for chunk in whole.chunk(shards(parameter))[: shard_rank(parameter)])
                local.copy_(whole[offset : offset + local.shape[0]])
            else:
                parameter.copy_(whole)


def shards(parameter):
    return parameter.device_mesh.size(parameter.device_mesh.ndim - 1)


def shard_rank(parameter):
    return parameter.device_mesh.get_local_rank(parameter.device_mesh.ndim - 1)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def one_process(case):
    """Losses by step, gradients of the first step and the last weights, by name."""
    count = case.micro_batches * case.dp_shard * case.dp_replicate
    batches = [micro_batch(index) for index in range(count)]
    module = builder(case).build().to(torch.float64)
    plan = builder(case).plan()
    materialise(module, case, {})
    for owner, user in plan.tied:
        module.get_submodule(user.rpartition(".")[0]).weight = module.get_parameter(owner)
    weight = sum(batch.weight() for batch in batches)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    losses, gradients = [], {}
    for _ in range(case.steps):
        optimizer.zero_grad()
        shares = []
        for batch in batches:
            share = cross_entropy_sum(module(batch.input_ids, **arguments(batch)), batch.labels)[0] / weight
            share.backward()
            shares.append(share.detach())
        gradients = gradients or {name: p.grad.clone() for name, p in module.named_parameters()}
        optimizer.step()
        losses.append(sum(shares).item())
    with torch.no_grad():
        logits = [module(batch.input_ids, **arguments(batch)) for batch in batches]
    return losses, gradients, {name: p.detach() for name, p in module.named_parameters()}, logits


@dataclass
class Pipeline:
    """One rank's part of a run."""

    mesh: ParallelMesh
    runner: PipelineRunner
    stages: dict
    batches: list
    weight: torch.Tensor
    tied: list
    group: object

    def step(self):
        """Forward, backward, tied sums; returns this rank's part of the loss."""
        for stage in self.stages.values():
            stage.zero_grad()

        def loss(logits, batch):
            return cross_entropy_sum(logits, batch.labels)[0] / self.weight

        losses = self.runner.train(self.batches, arguments, loss)
        sum_tied_gradients(self.tied, self.group)
        return sum(losses, torch.zeros((), dtype=torch.float64))


def pipeline(case, change_stage=lambda stage, number: stage):
    """Set up this rank: what an engine does, in few lines."""
    mesh = ParallelMesh.build(case.sizes, "cpu")
    plan = builder(case).plan()
    with torch.device("meta"):
        model = builder(case).build().to(torch.float64)
    numbers = stages_of_rank(mesh.rank("pp"), case.pp, case.vpp, case.schedule)
    stages = {}
    for number in numbers:
        stage = cut_stage(model, plan, stage=number, stages=case.sizes.stages, cuts=case.cuts)
        stage = change_stage(stage, number)
        if case.dp_shard * case.dp_replicate > 1:
            apply_data_parallel(stage, plan, mesh, DOUBLE)
        materialise(stage, case, {user: owner for owner, user in plan.tied})
        stages[number] = stage
    dp = mesh.size("dp")
    everything = [micro_batch(index) for index in range(case.micro_batches * dp)]
    runner = PipelineRunner(
        list(stages.values()),
        numbers,
        mesh,
        schedule=case.schedule,
        micro_batches=case.micro_batches,
        hidden_like=hidden_like,
        device=torch.device("cpu"),
    )
    return Pipeline(
        mesh=mesh,
        runner=runner,
        stages=stages,
        batches=everything[mesh.rank("dp") :: dp],
        weight=sum(batch.weight() for batch in everything),
        tied=tied_copies(stages, plan, stage_count=case.sizes.stages),
        group=tied_group(mesh),
    )


def train(case):
    """Losses by step (the same on all ranks), gradients of the first step, last weights, logits of this rank."""
    with process_group():
        return trained(case, pipeline(case))


def trained(case, run):
    named = [(f"{number}:{name}", p) for number, stage in run.stages.items() for name, p in stage.named_parameters()]
    optimizer = torch.optim.SGD([p for _, p in named], lr=LR)
    losses, gradients = [], {}
    for _ in range(case.steps):
        loss = run.step()
        dist.all_reduce(loss)
        losses.append(loss.item())
        gradients = gradients or {name: whole(p.grad) for name, p in named}
        optimizer.step()
    logits = run.runner.forward(run.batches, arguments, lambda logits, batch: logits)
    return losses, gradients, {name: whole(p) for name, p in named}, (run.mesh.rank("dp"), logits)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def compare(case, results):
    """All of what ranks found with one process's; every parameter must be on some stage."""
    losses, gradients, weights, logits = one_process(case)
    assert losses[-1] < 0.7 * losses[0] or case.steps < STEPS, "the batch must be learnt, or gradients hardly matter"
    owner_of = {user: owner for owner, user in builder(case).plan().tied}
    seen = set()
    dp = case.dp_shard * case.dp_replicate
    for found_losses, found_gradients, found_weights, (dp_rank, found_logits) in results:
        close(torch.tensor(found_losses), torch.tensor(losses))
        for key, gradient in found_gradients.items():
            name = key.partition(":")[2]
            name = owner_of.get(name, name)
            seen.add(name)
            close(gradient, gradients[name])
            close(found_weights[key], weights[name])
        for actual, expected in zip(found_logits, logits[dp_rank::dp] if found_logits else [], strict=True):
            close(actual, expected)
    assert seen == set(weights)
    assert any(found_logits for *_, (_, found_logits) in results)


TWO_RANKS = [
    Case(),
    Case(tied=True),
    Case(micro_batches=7),
    Case(cuts=("layers.0",)),
    Case(cuts=("layers.3",), tied=True),
    Case(schedule="interleaved"),
    Case(schedule="interleaved", tied=True),
    Case(schedule="interleaved", cuts=("layers.0", "layers.1", "layers.3")),
    Case(schedule="zbv"),
    Case(schedule="zbv", tied=True, micro_batches=5),
]


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_two_stages_ranks_train_as_one_process(ranks, case):
    compare(case, ranks(2).run(train, case))


FOUR_RANKS = [
    Case(schedule=schedule, dp_shard=2, zero_stage=stage, tied=schedule != "interleaved")
    for schedule in ("1f1b", "interleaved", "zbv")
    for stage in (1, 2, 3)
] + [
    Case(pp=4, tied=True),
    Case(dp_replicate=2, zero_stage=1),
    Case(schedule="interleaved", dp_shard=2, zero_stage=3, tied=True),
]


@pytest.mark.parametrize("case", FOUR_RANKS, ids=str)
def test_pipelines_train_with_sharded_data_parallelism_as_one_process(ranks, case):
    compare(case, ranks(4).run(train, case))
