"""From the plans of models to the library's layers: what becomes of each module, without the library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nxdt_plugin_nxd.errors import PlanNotExpressible
from nxdt_plugin_nxd.translation import MeshCoordinates, Translation, translate
from nxdt_testing.errors import raises
from torch import nn

from nxdt_core.config import load
from nxdt_core.errors.launch import HeadsDoNotDivide, ShardDoesNotDivide
from nxdt_core.errors.layouts import ExpertsDoNotDivide
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.train import build

_SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 32}
LLAMA = {**_SIZES, "name": "llama", "num_kv_heads": 2, "ffn_hidden_size": 48}
GPT = {**_SIZES, "name": "gpt", "ffn_hidden_size": 64, "has_bias": True, "make_vocab_size_divisible_by": 64}
MIXTRAL = {**LLAMA, "name": "mixtral", "moe": {"num_experts": 4}}


def model(section: dict[str, Any]) -> tuple[nn.Module, ParallelPlan]:
    config = load(
        {
            "name": "translation",
            "trainer": {"max_steps": 1},
            "data": {"name": "text", "train_files": ["package://nxdt_plugin_text/data/kjv.txt"], "seq_length": 16}
            | {"global_batch_size": 1, "micro_batch_size": 1, "tokenizer": {"library": "byte"}},
            "model": {**section, "optim": {"name": "adamw", "lr": 0.01}},
        }
    )
    builder = build.model_builder(config)
    with torch.device("meta"):
        return builder.build(), builder.plan()


def translated(section: dict[str, Any], tp: int = 2, *, sequence_parallel: bool = False) -> Translation:
    return translate(*model(section), tp=tp, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("section", [LLAMA, GPT, MIXTRAL], ids=lambda section: section["name"])
@pytest.mark.parametrize("tp", [2, 4])
def test_the_parts_of_all_ranks_are_each_parameter_once(section: dict[str, Any], tp: int) -> None:
    """But for copies of key and value heads."""
    found = translated(section, tp)
    shapes = {name: tuple(p.shape) for name, p in model(section)[0].named_parameters(remove_duplicate=False)}
    for name, shard in found.shards.items():
        covered = torch.zeros(shapes[name], dtype=torch.int64)
        for rank in range(tp):
            region = shard.region(rank)
            covered[tuple(slice(o, o + n) for o, n in zip(region.offsets, region.shape, strict=True))] += 1
        assert covered.unique().tolist() == [shard.copies], name
    matrices = {name for name in shapes if name.endswith(("proj.weight", "lm_head.weight", "embed_tokens.weight"))}
    assert matrices <= found.shards.keys()


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_are_distributed_and_each_is_divided(tp: int) -> None:
    found = translate(*model(MIXTRAL), tp=tp, ep=2)
    name = next(each for each in found.shards if each.endswith("experts.down_proj"))
    shard, whole = found.shards[name], model(MIXTRAL)[0].get_parameter(name).shape
    assert shard.region(0, 1).offsets == (2, 0, 0)
    assert shard.region(tp - 1, 1).shape == (2, 32, whole[2] // tp)
    assert shard.region(tp - 1, 0).offsets == (0, 0, whole[2] // tp * (tp - 1))
    assert found.dispatchers
    assert {each for each in found.shards if found.shards[each].expert_parts == 2} == {
        each for each in found.shards if ".experts." in each
    }


def test_experts_that_do_not_divide_are_refused() -> None:
    with raises(ExpertsDoNotDivide):
        translate(*model(MIXTRAL), tp=1, ep=3)


def test_modules_become_what_their_styles_say() -> None:
    styles = {each.path: each.style for each in translated(GPT, sequence_parallel=True).replacements}
    assert styles["embedding.tokens"] == "vocab_embedding"
    assert styles["embedding.positions"] == "replicate"
    assert styles["layers.1.attention.qkv_proj"] == "column"
    assert styles["layers.1.attention.o_proj"] == "row"
    assert styles["lm_head"] == "vocab_head"


def test_gradients_are_partial_where_a_rank_sees_its_part_alone() -> None:
    """Under sequence parallelism those of all whole parameters, else those within tensor blocks: of routers."""
    assert translated(LLAMA).partial == frozenset()
    assert "layers.0.attention_norm.weight" in translated(LLAMA, sequence_parallel=True).partial
    assert "layers.0.attention.o_proj.bias" in translated(GPT, sequence_parallel=True).partial
    assert translated(GPT).partial == frozenset()
    routers = translated(MIXTRAL).partial
    assert routers
    assert all(name.endswith("router.weight") for name in routers)


def test_neighbours_hold_copies_where_there_are_fewer_key_heads_than_ranks() -> None:
    found = translated(LLAMA, 4)
    key, query = found.shards["layers.0.attention.k_proj.weight"], found.shards["layers.0.attention.q_proj.weight"]
    assert (key.copies, key.parts) == (2, 2)
    assert [key.region(rank).offsets[0] for rank in range(4)] == [0, 0, 8, 8]
    assert query.copies == 1


def test_sizes_that_do_not_divide_are_refused() -> None:
    with raises(HeadsDoNotDivide):
        translated({**LLAMA, "num_attention_heads": 3, "num_kv_heads": 3, "hidden_size": 48})
    with raises(ShardDoesNotDivide):
        translated({**LLAMA, "ffn_hidden_size": 49})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor": {"lm_head": "column_gathered"}}, "style column_gathered"),
        ({"tensor": {"norm": "column"}}, "RMSNorm, not Linear"),
        ({"tensor_blocks": ("layers.*.attention",)}, "no pattern of tensor_blocks is around it"),
        ({"tensor_blocks": ("layers.*", "layers.*.attention", "lm_head")}, "inside of another"),
    ],
    ids=["gathered columns", "a norm", "outside of blocks", "nested blocks"],
)
def test_a_plan_that_the_engine_cannot_express_is_refused(changes: dict[str, Any], words: str) -> None:
    module, plan = model(LLAMA)
    with raises(PlanNotExpressible, match=words):
        translate(module, replace(plan, **changes), tp=2, sequence_parallel=False)


def test_an_embedding_without_a_style_is_refused_under_sequence_parallelism() -> None:
    module, plan = model(LLAMA)
    styles = {name: style for name, style in plan.tensor.items() if name != "embed_tokens"}
    with raises(PlanNotExpressible, match="embed_tokens"):
        translate(module, replace(plan, tensor=styles), tp=2, sequence_parallel=True)


def test_ranks_are_placed_as_data_and_checkpoints_assume() -> None:
    sizes = MeshSizes(pp=2, dp_shard=2, tp=2, zero_stage=0)
    places = [MeshCoordinates.of(rank, sizes).as_dict() for rank in range(8)]
    assert places[:4] == [
        {"tp": 0, "dp": 0, "pp": 0, "ep": 0},
        {"tp": 1, "dp": 0, "pp": 0, "ep": 0},
        {"tp": 0, "dp": 1, "pp": 0, "ep": 0},
        {"tp": 1, "dp": 1, "pp": 0, "ep": 0},
    ]
    assert places[4] == {"tp": 0, "dp": 0, "pp": 1, "ep": 0}
    shared = MeshSizes(dp_shard=4, tp=2, ep=2, zero_stage=0)
    assert [MeshCoordinates.of(rank, shared).ep for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [MeshCoordinates.of(rank, shared).expert_dp for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
