"""A small Llama in a pipeline, and the same in one process: losses, every gradient, weights and logits of both.

One batch is repeated, so that the loss falls; micro-batches have unequal masks and several documents.
"""

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from nxdt_plugin_llama.builder import LlamaBuilder
from nxdt_plugin_llama.config import LlamaConfig
from nxdt_testing.ranks import process_group
from torch import nn
from torch.distributed.tensor import DTensor

from nxdt_core.distributed.placement import local_of, local_shard_of
from nxdt_core.engine.data.fsdp import apply_data_parallel
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.pipeline.runner import PipelineRunner
from nxdt_core.engine.pipeline.split import cut_stage, sum_tied_gradients, tied_copies, tied_group
from nxdt_core.engine.recompute import apply_recompute
from nxdt_core.models.loss import cross_entropy_sum
from nxdt_core.models.moe.layer import add_aux_loss
from nxdt_core.models.random.init import draw, rule_for
from nxdt_core.models.step_boundary import at_step_boundary
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.mesh import MeshSizes, stages_of_rank
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.step_context import StepContext

VOCAB, HIDDEN, SEQ = 32, 16, 12
LR = 0.1
DOUBLE = PrecisionPolicy(name="double", parameters="float64", gradients="float64")


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
    layers: int = 4
    cuts: tuple[str, ...] | None = None
    aux: bool = False
    recompute: str | None = None
    precision: PrecisionPolicy = DOUBLE
    steps: int = 4

    def __str__(self):
        """What differs from the defaults, for the test's name."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return " ".join(f"{name}={value}" for name, value in given) or "plain"

    @property
    def dtype(self):
        return torch.float32 if self.precision.master_weights else getattr(torch, self.precision.parameters)

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
            num_layers=case.layers,
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


class SquaredMlp(nn.Module):
    """A feed-forward block with an auxiliary loss, the sum of its squared outputs."""

    def __init__(self, mlp):
        super().__init__()
        self.inner = mlp

    def forward(self, hidden):
        out = self.inner(hidden)
        return add_aux_loss(out, 0.01 * out.square().sum())


def build(case):
    """The whole model on the meta device."""
    with torch.device("meta"):
        model = builder(case).build().to(case.dtype)
        if case.aux:
            for layer in model.layers.values():
                layer.mlp = SquaredMlp(layer.mlp)
    return model


@torch.no_grad()
def materialise(module, case):
    """Memory and weights; a second copy of a tied parameter draws its owner's."""
    module.to_empty(device="cpu")
    rules, plan = builder(case).init_rules(), builder(case).plan()
    owner_of = {user: owner for owner, user in plan.tied}
    for part in module.modules():
        if hasattr(part, "reset_buffers"):
            part.reset_buffers()
    for name, parameter in module.named_parameters():
        name, shard = owner_of.get(name, name), local_shard_of(parameter)
        values = draw(
            shard.shape,
            rule_for(name, rules),
            name=name,
            seed=1,
            dtype=parameter.dtype,
            offsets=shard.region.offsets,
            local_shape=shard.region.shape,
        )
        local_of(parameter).copy_(values)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def one_process(case):
    """Losses by step, gradients of the first step and the last weights, by name."""
    count = case.micro_batches * case.dp_shard * case.dp_replicate
    batches = [micro_batch(index) for index in range(count)]
    module = build(case)
    materialise(module, case)
    for owner, user in builder(case).plan().tied:
        module.get_submodule(user.rpartition(".")[0]).weight = module.get_parameter(owner)
    weight = sum(batch.weight() for batch in batches)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    losses, gradients = [], {}
    for _ in range(case.steps):
        optimizer.zero_grad()
        shares = []
        for batch in batches:
            with at_step_boundary(StepContext(aux_loss_scale=1 / weight)):
                logits = module(batch.input_ids, **arguments(batch))
            share = cross_entropy_sum(logits, batch.labels)[0] / weight
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

        def loss(logits, batch, step):
            return cross_entropy_sum(logits, batch.labels, step=step)[0] / self.weight

        step = StepContext(aux_loss_scale=1 / self.weight)
        with at_step_boundary(step):  # SquaredMlp has no parameter for it
            losses = self.runner.train(self.batches, lambda batch: step, loss)
        sum_tied_gradients(self.tied, self.group)
        return sum(losses, torch.zeros((), dtype=torch.float64))


def pipeline(case):
    """Set up this rank: what an engine does, in few lines."""
    mesh = ParallelMesh.build(case.sizes, "cpu")
    plan = builder(case).plan()
    model = build(case)
    numbers = stages_of_rank(mesh.rank("pp"), case.pp, case.vpp, case.schedule)
    stages = {}
    for number in numbers:
        stage = cut_stage(model, plan, stage=number, stages=case.sizes.stages, cuts=case.cuts)
        apply_recompute(stage, plan, granularity=case.recompute)
        if case.dp_shard * case.dp_replicate > 1:
            apply_data_parallel(stage, plan, mesh, case.precision)
        materialise(stage, case)
        stages[number] = stage
    dp = mesh.size("dp")
    everything = [micro_batch(index) for index in range(case.micro_batches * dp)]
    runner = PipelineRunner(
        stages,
        mesh,
        micro_batches=case.micro_batches,
        hidden_shape=lambda batch: (*batch.input_ids.shape, HIDDEN),
        hidden_dtype=getattr(torch, case.precision.parameters),
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
    logits = run.runner.forward(run.batches, lambda batch: StepContext(), lambda logits, *_: logits)
    return losses, gradients, {name: whole(p) for name, p in named}, (run.mesh.rank("dp"), logits)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def compare(case, results):
    """All of what ranks found with one process's; every parameter must be on some stage."""
    losses, gradients, weights, logits = one_process(case)
    assert losses[-1] < losses[0] or case.steps == 1, "the batch must be learnt, or gradients hardly matter"
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
