"""Context parallelism around attention: batches cut and put together, cores replaced or refused, a whole model."""

from __future__ import annotations

import dataclasses
import itertools
import unittest.mock

import pytest
import torch
import torch.distributed as dist
from nxdt_plugin_llama.builder import LlamaBuilder
from nxdt_plugin_llama.config import LlamaConfig
from nxdt_testing.errors import raises
from nxdt_testing.ranks import process_group
from torch import nn

from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.engine.context.attention import apply_context_parallel, shard_sequence, unshard_sequence
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.errors.layouts import (
    AttentionCoreMissing,
    AttentionCoreUnknown,
    ContextSequenceDoesNotDivide,
    RingNeedsPointToPoint,
)
from nxdt_core.models.attention.grouped_query import AttentionSemantics, CausalAttention
from nxdt_core.models.loss import cross_entropy_sum
from nxdt_core.models.random.dropout import CausalAttentionWithDropout
from nxdt_core.models.random.init import initialize
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan, PipelinePlan
from tests.sampling import slow, takes_all

VOCAB, SEQ = 32, 16
CONFIG = LlamaConfig(
    num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, num_kv_heads=2, vocab_size=VOCAB,
    max_position_embeddings=SEQ,
)  # fmt: skip
STEPS = 3


def mesh_of(cp: int, rank: int = 0) -> ParallelMesh:
    """One rank's coordinates, without a process group."""
    return ParallelMesh(MeshSizes(cp=cp), None, rank=rank)


def batch(*, packed: bool) -> Batch:
    """Two rows; packed ones restart positions with each document and end in padding. Some labels are ignored."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 2:4] = -100
    if not packed:
        return Batch(input_ids=tokens[:, :-1], labels=labels)
    ids = torch.tensor([[0] * 5 + [1] * 6 + [2] * 5, [0] * 9 + [1] * 3 + [-1] * 4])
    positions = torch.tensor([[*range(5), *range(6), *range(5)], [*range(9), *range(3), *range(4)]])
    labels[ids == -1] = -100
    return Batch(
        input_ids=tokens[:, :-1],
        labels=labels,
        loss_weights=torch.rand(2, SEQ, generator=generator),
        position_ids=positions,
        document_ids=ids,
    )


def test_a_rank_holds_an_early_and_a_late_chunk_of_every_field():
    whole = Batch(
        **{
            name: torch.arange(8).expand(2, 8) + 100 * number
            for number, name in enumerate(("input_ids", "labels", "loss_weights", "position_ids", "document_ids"))
        }
    )
    for rank, tokens in ((0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])):
        shard = shard_sequence(whole, mesh_of(2, rank))
        assert shard.input_ids.tolist() == [tokens] * 2
        assert shard.labels.tolist() == [[100 + t for t in tokens]] * 2
        assert shard.loss_weights.tolist() == [[200 + t for t in tokens]] * 2
        assert shard.position_ids.tolist() == [[300 + t for t in tokens]] * 2
        assert shard.document_ids.tolist() == [[400 + t for t in tokens]] * 2


def test_positions_are_those_of_the_whole_sequence_where_the_batch_has_none():
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    shard = shard_sequence(Batch(input_ids=tokens, labels=tokens), mesh_of(3, rank=1))
    assert shard.position_ids.tolist() == [[2, 3, 8, 9]] * 2
    assert shard.document_ids is None
    assert shard.loss_weights is None


def test_shards_weigh_what_the_whole_does():
    whole = batch(packed=True)
    parts = [shard_sequence(whole, mesh_of(4, rank)).weight() for rank in range(4)]
    torch.testing.assert_close(sum(parts), whole.weight())


def test_one_rank_keeps_the_batch():
    whole = batch(packed=False)
    assert shard_sequence(whole, mesh_of(1)) is whole
    assert unshard_sequence(whole.labels, mesh_of(1)) is whole.labels


@pytest.mark.parametrize("length", [0, 4, 12, 15])
def test_a_sequence_that_does_not_divide_is_refused_with_the_numbers(length):
    tokens = torch.zeros(1, length, dtype=torch.int64)
    with raises(ContextSequenceDoesNotDivide) as refused:
        shard_sequence(Batch(input_ids=tokens, labels=tokens), mesh_of(4))
    assert f"{length} tokens" in str(refused.value)
    assert "8 equal chunks" in str(refused.value)
    assert f"({8 if length <= 8 else 16}, say)" in str(refused.value)


class Windowed(CausalAttention):
    """Does more than its base class and does not say so."""

    def forward(self, query, key, value, document_ids=None):
        return query


class Cosine(CausalAttention):
    """Another scale, and says so."""

    def semantics(self):
        return AttentionSemantics(causal=True, scale=0.25)

    def forward(self, query, key, value, document_ids=None):
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.25)


class Encoder(CausalAttention):
    def semantics(self):
        return AttentionSemantics(causal=False)


def refusals() -> dict[str, str]:
    """What is said of each core."""
    found = {}
    with process_group():
        mesh = ParallelMesh.build(MeshSizes(cp=2), "cpu")
        for core in (nn.Identity(), Windowed(), Encoder(), CausalAttentionWithDropout(0.1)):
            model = nn.ModuleDict({"core": core})
            with raises(AttentionCoreUnknown) as refused:
                apply_context_parallel(model, ParallelPlan(attention_cores=("core",)), mesh, method="ring")
            assert model["core"] is core
            found[type(core).__name__] = refused.value.what()
        for name, plan in (("none", ParallelPlan()), ("absent", ParallelPlan(attention_cores=("layers.*.kernel",)))):
            with raises(AttentionCoreMissing) as missing:
                apply_context_parallel(LlamaBuilder(CONFIG).build(), plan, mesh, method="ring")
            found[name] = missing.value.what()
        only_collectives = dataclasses.replace(profile_of(HOST), point_to_point=False)
        with (
            unittest.mock.patch.dict("nxdt_core.distributed.devices.PROFILES", {HOST.type: only_collectives}),
            raises(RingNeedsPointToPoint) as refused,
        ):
            apply_context_parallel(LlamaBuilder(CONFIG).build(), LlamaBuilder(CONFIG).plan(), mesh, method="ring")
        found["hops"] = refused.value.what()
        stage = nn.ModuleDict({"layers": nn.ModuleDict(), "head": nn.Linear(2, 2)})
        plan = ParallelPlan(attention_cores=("layers.*.core",), pipeline=PipelinePlan(layers="layers", hidden_size=2))
        apply_context_parallel(stage, plan, mesh, method="ring")  # a pipeline stage without layers has none
    return found


def test_cores_that_cannot_be_sharded_are_refused_in_words(ranks):
    found = ranks(2).run(refusals)[0]
    assert "'core' (Identity)" in found["Identity"]
    assert "does not say what it computes" in found["Identity"]
    assert "overrides forward() and not semantics()" in found["Windowed"]
    assert "see later ones" in found["Encoder"]
    assert "it has dropout" in found["CausalAttentionWithDropout"]
    assert "plan names no attention" in found["none"]
    assert "'layers.*.kernel'" in found["absent"]
    assert "context_parallel_size is 2" in found["none"]
    assert f"devices of type '{HOST.type}' cannot send" in found["hops"]


def scaled(method: str) -> float:
    with process_group():
        mesh = ParallelMesh.build(MeshSizes(cp=2), "cpu")
        query, key, value = torch.randn(3, 2, 2, 8, 4, generator=torch.Generator().manual_seed(0)).double().unbind()
        model = nn.ModuleDict({"core": Cosine()})
        expected = model["core"](query, key, value)
        apply_context_parallel(model, ParallelPlan(attention_cores=("core",)), mesh, method=method)
        chunks = [mesh.rank("cp"), 3 - mesh.rank("cp")]
        local = (torch.cat([t.chunk(4, 2)[chunk] for chunk in chunks], 2) for t in (query, key, value))
        return (unshard_sequence(model["core"](*local), mesh, dim=2) - expected).abs().max().item()


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_a_core_of_any_class_is_replaced_with_its_own_scale(ranks, method):
    assert max(ranks(2).run(scaled, method)) < 1e-12


def train(mesh: ParallelMesh | None, method: str, dtype: torch.dtype, *, packed: bool) -> list[dict[str, torch.Tensor]]:
    """Plain SGD on one batch; loss and gradients of each step, summed over the ranks of ``mesh``."""
    builder = LlamaBuilder(CONFIG)
    model, data = builder.build().to(dtype), batch(packed=packed)
    initialize(model.named_parameters(), list(builder.init_rules()), seed=1)
    weight = data.weight()
    if mesh is not None:
        apply_context_parallel(model, builder.plan(), mesh, method=method)
        data = shard_sequence(data, mesh)
    history = []
    for _ in range(STEPS):
        logits = model(data.input_ids, data.position_ids, data.document_ids)
        loss = cross_entropy_sum(logits, data.labels, data.loss_weights)[0] / weight
        loss.backward()
        step = {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
        if mesh is not None:
            for tensor in step.values():
                dist.all_reduce(tensor, group=mesh.group("cp"))
        history.append({name: tensor.clone() for name, tensor in step.items()})
        torch.optim.SGD(model.parameters(), lr=2.0).step()
        model.zero_grad(set_to_none=True)
    return history


CASES = list(itertools.product(("ring", "gather"), (torch.float64, torch.float32), (False, True)))


def train_on_ranks(cases: list[tuple[str, torch.dtype, bool]]) -> list[list[dict[str, torch.Tensor]]]:
    with process_group():
        mesh = ParallelMesh.build(MeshSizes(cp=dist.get_world_size()), "cpu")
        return [train(mesh, method, dtype, packed=packed) for method, dtype, packed in cases]


@pytest.mark.parametrize("size", [2, slow(4)])
def test_a_model_trains_as_in_one_process(ranks, pytestconfig, size):
    """In float64; in float32, which attention alone shows by default (test_context_attention.py), with all samples."""
    cases = [case for case in CASES if case[1] == torch.float64 or takes_all(pytestconfig)]
    found = ranks(size).run(train_on_ranks, cases)
    for number, (method, dtype, packed) in enumerate(cases):
        alone = train(None, method, dtype, packed=packed)
        assert alone[-1]["loss"] < 0.9 * alone[0]["loss"]
        tolerance = 1e-9 if dtype == torch.float64 else 1e-5
        for together in (histories[number] for histories in found):
            for step, expected in zip(together, alone, strict=True):
                for name, tensor in expected.items():
                    where = f"{name} with {method}, {dtype}, {packed=}"
                    torch.testing.assert_close(
                        step[name],
                        tensor,
                        rtol=tolerance,
                        atol=tolerance,
                        msg=lambda text, where=where: f"{where}: {text}",
                    )
