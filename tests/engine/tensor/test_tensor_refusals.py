"""What tensor parallelism refuses, and how heads are shared out: no process but this one is needed."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.errors import raises
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from nxdt_core.distributed.placement import sharded_over
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.tensor.apply import apply_tensor_parallel, partial_parameters
from nxdt_core.engine.tensor.layers import HeadSharding, PaddedDim
from nxdt_core.errors.launch import HeadsDoNotDivide, SequenceDoesNotDivide, ShardDoesNotDivide, TensorPlanUnusable
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import AttentionHeads, ParallelPlan
from tests.engine.tensor.models import HIDDEN, SEQ, VOCAB, Biased, biased_plan, llama

Meshes = Callable[[int], ParallelMesh]


@pytest.fixture
def mesh_of() -> Iterator[Meshes]:
    """``mesh_of(tp)``: the mesh that rank 0 of so many would have; its collectives do nothing."""

    def build(tp: int) -> ParallelMesh:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
        return ParallelMesh.build(MeshSizes(tp=tp), "cpu")

    yield build
    if dist.is_initialized():
        dist.destroy_process_group()


def biased(heads: int = 4, kv_heads: int = 4) -> tuple[nn.Module, ParallelPlan]:
    with torch.device("meta"):
        return Biased(heads, kv_heads), biased_plan(heads, kv_heads)


@pytest.mark.parametrize(
    ("query", "kv", "tp", "possible"), [(6, 2, 4, "1, 2, 6"), (6, 3, 2, "1, 3, 6"), (9, 3, 6, "1, 3, 9")]
)
def test_uneven_heads_are_refused_with_sizes_that_work(query: int, kv: int, tp: int, possible: str) -> None:
    heads = AttentionHeads(query_heads=query, kv_heads=kv, query=("q",), key_value=("k",), output=("o",))
    with raises(HeadsDoNotDivide, match=rf"{query} query heads.*{kv} key/value.*{tp} tensor") as error:
        HeadSharding.of(heads, tp)
    assert f"({possible})" in error.value.do()
    assert HeadSharding.of(heads, tp, pad=True).padded


def test_copies_need_a_plan_that_names_the_projections() -> None:
    with raises(HeadsDoNotDivide, match="does not say which modules"):
        HeadSharding.of(AttentionHeads(query_heads=8, kv_heads=2), 4)


@pytest.mark.parametrize("kv", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("group", [1, 2, 3, 7])
@pytest.mark.parametrize("tp", [2, 3, 4, 6, 8])
def test_every_query_head_lies_beside_its_key_once(kv: int, group: int, tp: int) -> None:
    heads = AttentionHeads(query_heads=kv * group, kv_heads=kv, query=("q",), key_value=("k",), output=("o",))
    layout = HeadSharding.of(heads, tp, pad=True)
    query, key = layout.query(0, 1), layout.key_value(0, 1)
    assert query.parts == tp
    assert key.parts * layout.kv_replicas == tp
    seen = []
    for rank in range(tp):
        keys = range(key.starts[rank // layout.kv_replicas], kv)[: key.counts[rank // layout.kv_replicas]]
        own = range(query.starts[rank], kv * group)[: query.counts[rank]]
        per_key = query.block // key.block  # as attention counts it off the projections' outputs
        assert per_key * key.block == query.block
        assert all(keys[place // per_key] == head // group for place, head in enumerate(own))
        seen += own
    assert seen == list(range(kv * group))
    assert layout.padded == (query.block * tp != kv * group)


def test_real_elements_of_a_shard_of_a_padded_part() -> None:
    padded = PaddedDim.of(0, block=2, starts=(0, 2), counts=(2, 1), unit=4)
    assert padded.real(0, 8) == (0, 8)
    assert padded.real(8, 8) == (8, 4)
    assert padded.real(8, 3) == (8, 3)  # shards of FSDP2 within the second part
    assert padded.real(11, 3) == (11, 1)
    assert padded.real(14, 2) == (0, 0)
    assert padded.real(16, 0) == (0, 0)


@pytest.mark.parametrize(
    ("path", "module", "wanted"),
    [
        ("mlp.up", nn.Linear(32, 65), r"'mlp.up' has 65 output features"),
        ("mlp.down", nn.Linear(65, 32), r"'mlp.down' has 65 input features"),
        ("head", nn.Linear(32, 49), r"'head' has 49 rows of the vocabulary"),
        ("tokens", nn.Embedding(49, 32), r"'tokens' has 49 rows of the vocabulary"),
    ],
)
def test_uneven_matrices_are_refused_with_the_next_size(
    mesh_of: Meshes, path: str, module: nn.Module, wanted: str
) -> None:
    model, plan = biased()
    model.set_submodule(path, module)
    with raises(ShardDoesNotDivide, match=wanted) as error:
        apply_tensor_parallel(model, plan, mesh_of(4), sequence_parallel=False)
    assert error.value.do().startswith(f"Make it {52 if error.value.size == 49 else 68} (a multiple of 4)")


class Doubling(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


@pytest.mark.parametrize(
    ("path", "module", "wanted"),
    [
        ("mlp.up", Doubling(32, 64), "'mlp.up' is column and no torch.nn.Linear, but Doubling"),
        ("tokens", nn.Linear(4, 4), "'tokens' is vocab_embedding and no torch.nn.Embedding, but Linear"),
        ("tokens", nn.Embedding(48, 32, max_norm=1.0), "'tokens' has max_norm"),
        ("attention.query", nn.Linear(32, 30), "'attention.query' has 30 features, no multiple of 4 heads"),
    ],
)
def test_modules_that_no_style_can_shard_are_refused(
    mesh_of: Meshes, path: str, module: nn.Module, wanted: str
) -> None:
    model, plan = biased()
    model.set_submodule(path, module)
    with pytest.raises(TensorPlanUnusable, match=wanted):
        apply_tensor_parallel(model, plan, mesh_of(2), sequence_parallel=False)


def test_a_bias_cannot_be_part_of_a_sum_that_others_make(mesh_of: Meshes) -> None:
    model, plan = biased()
    rows = [path for path, style in plan.tensor.items() if style == "row" and path.startswith("mlp")]
    row = next(path for path in rows if model.get_submodule(path).bias is not None)
    with pytest.raises(TensorPlanUnusable, match="is row_partial and has a bias"):
        apply_tensor_parallel(
            model, replace(plan, tensor={**plan.tensor, row: "row_partial"}), mesh_of(2), sequence_parallel=False
        )


def test_sharded_modules_must_lie_in_a_block_and_blocks_in_none(mesh_of: Meshes) -> None:
    model, plan = biased()
    mesh = mesh_of(2)
    with pytest.raises(TensorPlanUnusable, match=r"'mlp\.up' is column, and no pattern of tensor_blocks is around it"):
        apply_tensor_parallel(model, replace(plan, tensor_blocks=("attention", "head")), mesh, sequence_parallel=False)
    model, plan = biased()
    with pytest.raises(TensorPlanUnusable, match=r"'mlp\.up' is inside the tensor block 'mlp'"):
        apply_tensor_parallel(
            model, replace(plan, tensor_blocks=(*plan.tensor_blocks, "mlp.up")), mesh, sequence_parallel=False
        )


@pytest.mark.parametrize(
    ("left_out", "wanted"), [("positions", "a style for the embedding 'positions'"), ("head", "needs a vocab_head")]
)
def test_sequence_parallelism_needs_to_know_where_the_sequence_is_cut(
    mesh_of: Meshes, left_out: str, wanted: str
) -> None:
    model, plan = biased()
    plan = replace(plan, tensor={path: style for path, style in plan.tensor.items() if path != left_out})
    mesh = mesh_of(2)
    with pytest.raises(TensorPlanUnusable, match=wanted):
        apply_tensor_parallel(model, plan, mesh, sequence_parallel=True)
    apply_tensor_parallel(model, plan, mesh, sequence_parallel=False)


def test_hidden_states_by_keyword_are_a_mistake_of_the_model(mesh_of: Meshes) -> None:
    model, plan = biased()
    apply_tensor_parallel(model, plan, mesh_of(2), sequence_parallel=False)
    with pytest.raises(TypeError, match="FeedForward is a tensor block: give it its hidden states by position"):
        model.mlp(hidden=torch.zeros(1, SEQ, HIDDEN))


def test_sequence_must_divide(mesh_of: Meshes) -> None:
    model, plan = biased()
    apply_tensor_parallel(model, plan, mesh_of(2), sequence_parallel=True)
    model.to_empty(device="cpu")
    with raises(SequenceDoesNotDivide, match="15 tokens does not fall into 2 equal parts"):
        model(torch.zeros(1, 15, dtype=torch.long))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_ids_outside_of_the_vocabulary_fail_as_in_one_process(mesh_of: Meshes, token: int) -> None:
    model, plan = biased()
    apply_tensor_parallel(model, plan, mesh_of(2), sequence_parallel=False)
    model.to_empty(device="cpu")
    with pytest.raises(IndexError):
        model(torch.full((1, SEQ), token))


def test_stages_without_some_parts_are_left_alone(mesh_of: Meshes) -> None:
    with torch.device("meta"):
        builder = llama(4, 2, tied=False)
        model, plan = builder.build(), builder.plan()
    model.embed_tokens, model.norm, model.lm_head = nn.Identity(), nn.Identity(), nn.Identity()
    apply_tensor_parallel(model, plan, mesh_of(2), sequence_parallel=True)
    assert type(model.lm_head) is nn.Identity
    assert not model.lm_head._forward_pre_hooks
    assert "layers.0.attention_norm.weight" in partial_parameters(model, plan, sequence_parallel=True)


def test_one_rank_changes_nothing() -> None:
    model, plan = biased()
    apply_tensor_parallel(model, plan, ParallelMesh.build(MeshSizes(), "cpu"), sequence_parallel=True)
    assert type(model.mlp.up) is nn.Linear


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_whose_gradients_are_partial(mesh_of: Meshes, sequence_parallel: bool) -> None:
    model, plan = biased(4, 1)
    apply_tensor_parallel(model, plan, mesh_of(4), sequence_parallel=sequence_parallel)
    inside = {"attention.head_norm.weight"}
    outside = {f"norm_{n}.{leaf}" for n in (1, 2, 3) for leaf in ("weight", "bias")} | {
        "positions.weight",
        "attention.out.bias",
        "mlp.down.bias",
        "mlp.wide.weight",
        "mlp.wide.bias",
    }
    expected = inside | outside if sequence_parallel else inside
    assert partial_parameters(model, plan, sequence_parallel=sequence_parallel) == expected
    copied = {name for name, parameter in model.named_parameters() if "tp_kv" in sharded_over(parameter)}
    assert copied == {f"attention.{p}.{q}" for p in ("key", "value") for q in ("weight", "bias")}
