"""Layouts that cannot work are told with their numbers, all of them at once, before anything is launched."""

from __future__ import annotations

import pytest

from nxdt_core.config.checks import Checked, find_impossible
from nxdt_core.config.schema import DistributedStrategyConfig
from nxdt_core.config.section import keys_of
from nxdt_core.config.sources import COMMAND_LINE
from nxdt_core.config.tree import Tree
from nxdt_core.engine.layout_rules import find_impossible_layouts

TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, SCHEDULE = "context_parallel_size", "expert_model_parallel_size", "pipeline_schedule"
SHUFFLE = "token_shuffle_group_size"


def layout(devices, nodes=1, **strategy):
    defaults = {name: key.default for name, key in keys_of(DistributedStrategyConfig).items()}
    assert strategy.keys() <= defaults.keys()
    values = {f"distributed_strategy.{name}": value for name, value in (defaults | strategy).items()}
    return {"trainer.devices": devices, "trainer.num_nodes": nodes, **values}


def batches(count, micro=1):
    return {"data.global_batch_size": count, "data.micro_batch_size": micro}


IMPOSSIBLE = {
    "world": (
        layout(6, **{TP: 4}),
        "1 x 6 processes do not divide into groups of TP 4 x PP 1 x CP 1.",
    ),
    "world over nodes": (
        layout(4, 3, **{TP: 2, PP: 2, CP: 2}),
        "3 x 4 processes do not divide into groups of TP 2 x PP 2 x CP 2.",
    ),
    "replicas": (
        layout(12, dp_replicate=4, **{TP: 2}),
        "6 data parallel ranks do not divide into 4 groups.",
    ),
    "expert ranks": (
        layout(12, dp_replicate=2, **{CP: 2, EP: 4}) | {"model.moe.num_experts": 8},
        "expert parallelism borrows from 6 data and context parallel ranks, which EP 4 does not divide.",
    ),
    "batch": (layout(4) | batches(12, 2), "12 does not divide by data.micro_batch_size 2 x 4 data parallel ranks."),
    "batch under context parallelism": (
        layout(8, **{CP: 2}) | batches(12, 2),
        "12 does not divide by data.micro_batch_size 2 x 4 data parallel ranks.",
    ),
    "heads": (
        layout(8, **{TP: 8}) | {"model.num_attention_heads": 12},
        "12 does not divide by tensor_model_parallel_size 8.",
    ),
    "kv heads, too few copies": (
        layout(8, kv_replicator=2, **{TP: 8}) | {"model.num_kv_heads": 2},
        "2 heads x kv_replicator 2 does not divide by tensor_model_parallel_size 8.",
    ),
    "kv heads, neither shared nor copied": (
        layout(4, kv_replicator=2, **{TP: 4}) | {"model.num_kv_heads": 6},
        "6 key and value heads can neither be shared out nor copied evenly over tensor_model_parallel_size 4.",
    ),
    "feed-forward": (
        layout(4, **{TP: 4}) | {"model.ffn_hidden_size": 30},
        "30 does not divide by tensor_model_parallel_size 4.",
    ),
    "vocabulary": (
        layout(4, **{TP: 4}) | {"model.vocab_size": 257},
        "257 does not divide by tensor_model_parallel_size 4.",
    ),
    "experts": (
        layout(3, **{EP: 3}) | {"model.moe.num_experts": 8},
        "8 experts do not divide by expert_model_parallel_size 3.",
    ),
    "no experts": (
        layout(2, **{EP: 2}),
        "EP 2 shares out experts, and the model has none (model.moe.num_experts is not set).",
    ),
    "nobody to shuffle with": (
        layout(8, dp_replicate=2, **{SHUFFLE: 8}) | {"model.moe.num_experts": 8},
        "4 data parallel ranks do not divide into groups of 8 that exchange tokens.",
    ),
    "tokens to shuffle": (
        layout(24, sequence_parallel=True, **{SHUFFLE: 6, TP: 4})
        | {"model.moe.num_experts": 8, "data.seq_length": 64, "data.micro_batch_size": 2},
        "a rank's 32 tokens of a micro-batch do not divide over 6 ranks that exchange them.",
    ),
    "nothing to shuffle for": (
        layout(2, **{SHUFFLE: 2}),
        "tokens are exchanged before experts, and the model has none (model.moe.num_experts is not set).",
    ),
    "sequence over context": (
        layout(2, **{CP: 2}) | {"data.seq_length": 102},
        "102 tokens do not divide into 4 equal parts (CP 2, TP 1).",
    ),
    "sequence over tensor": (
        layout(4, sequence_parallel=True, **{TP: 4}) | {"data.seq_length": 66},
        "66 tokens do not divide into 4 equal parts (CP 1, TP 4 with sequence_parallel).",
    ),
    "sequence over both": (
        layout(6, sequence_parallel=True, **{TP: 3, CP: 2}) | {"data.seq_length": 18},
        "18 tokens do not divide into 12 equal parts (CP 2, TP 3 with sequence_parallel).",
    ),
    "layers": (
        layout(4, **{PP: 4, VPP: 2}) | {"model.num_layers": 7},
        "7 layers cannot fill PP 4 x 2 a device = 8 stages.",
    ),
    "layers under zbv": (
        layout(4, **{PP: 4, SCHEDULE: "zbv"}) | {"model.num_layers": 7},
        "7 layers cannot fill PP 4 x 2 a device = 8 stages.",
    ),
    "cuts": (
        layout(4, **{PP: 4}) | {"model.num_layers": 5, "model.pipeline_cuts": ("a", "b")},
        "2 cuts make 3 stages, but there are PP 4 x 1 a device = 4 stages.",
    ),
    "1f1b with virtual stages": (
        layout(2, **{PP: 2, VPP: 2, SCHEDULE: "1f1b"}),
        "the schedule 1f1b has one stage a device, and virtual_pipeline_model_parallel_size is 2.",
    ),
    "interleaved without": (
        layout(2, **{PP: 2, SCHEDULE: "interleaved"}),
        "the schedule interleaved has several stages a device, and virtual_pipeline_model_parallel_size is 1.",
    ),
    "zbv with more": (
        layout(2, **{PP: 2, VPP: 3, SCHEDULE: "zbv"}),
        "the schedule zbv has two stages a device, and virtual_pipeline_model_parallel_size is 3.",
    ),
    "1f1b starved": (
        layout(8, **{PP: 4}) | batches(12, 2),
        "each data parallel rank has 3 micro-batches per step, and the schedule 1f1b over 4 pipeline ranks needs"
        " at least 4, one per stage.",
    ),
    "interleaved in uneven rounds": (
        layout(2, **{PP: 2, VPP: 2}) | batches(5),
        "each data parallel rank has 5 micro-batches per step, and the schedule interleaved over 2 pipeline ranks needs"
        " rounds of one size, and 5 do not divide into 2.",
    ),
    "zbv recomputed": (
        layout(2, **{PP: 2, SCHEDULE: "zbv"}) | {"model.activations_checkpoint_granularity": "full"},
        "the schedule zbv takes the backward of layers apart, and would recompute each of them many times.",
    ),
    "zbv compiled": (
        layout(2, **{PP: 2, SCHEDULE: "zbv"}) | {"model.compile": True},
        "the schedule zbv takes the backward of layers apart, and that of a compiled layer is one piece.",
    ),
}

POSSIBLE = {
    "everything divides": layout(
        8, 4, sequence_parallel=True, zero_stage=2, dp_replicate=2, **{TP: 2, PP: 2, CP: 2, EP: 2, VPP: None}
    )
    | batches(16, 2)
    | {"data.seq_length": 64, "model.num_attention_heads": 4, "model.num_kv_heads": 2, "model.num_layers": 4}
    | {"model.moe.num_experts": 4, "model.ffn_hidden_size": 24, "model.vocab_size": 256},
    "context and sequence parallelism share a factor": layout(8, sequence_parallel=True, **{TP: 4, CP: 2})
    | {"data.seq_length": 8},
    "tokens are shuffled": layout(8, sequence_parallel=True, **{TP: 2, CP: 2, SHUFFLE: 2})
    | {"model.moe.num_experts": 8, "data.seq_length": 64, "data.micro_batch_size": 1},
    "copies are derived": layout(8, **{TP: 8}) | {"model.num_attention_heads": 8, "model.num_kv_heads": 2},
    "copies are written": layout(8, kv_replicator=4, **{TP: 8}) | {"model.num_kv_heads": 2},
    "more copies than are needed": layout(8, kv_replicator=8, **{TP: 8}) | {"model.num_kv_heads": 2},
    "kv heads are query heads": layout(2, **{TP: 2}) | {"model.num_attention_heads": 4, "model.num_kv_heads": None},
    "heads are padded": layout(4, pad_heads=True, **{TP: 4}) | {"model.num_attention_heads": 6},
    "cuts are chosen": layout(4, **{PP: 4}) | {"model.num_layers": 5},
    "cuts say where": layout(2, **{PP: 2}) | {"model.num_layers": 5, "model.pipeline_cuts": ("layers.1",)},
    "fewer micro-batches than a round": layout(4, **{PP: 4, VPP: 2}) | batches(3),
    "rounds of five": layout(2, **{PP: 4, VPP: 2}) | {"trainer.devices": 4} | batches(10),
    "zbv takes any number": layout(4, **{PP: 4, SCHEDULE: "zbv"}) | batches(1),
    "one rank has no pipeline": layout(2, **{VPP: 3, SCHEDULE: "zbv"})
    | {"model.num_layers": 5, "model.compile": True, "model.pipeline_cuts": ("a",)}
    | batches(2),
}


def found(values):
    checked = Checked(values, Tree.of({}, COMMAND_LINE))
    return [problem.what() for problem in (*find_impossible(checked), *find_impossible_layouts(checked))]


@pytest.mark.parametrize(("values", "sentence"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_work_is_told_with_its_numbers(values, sentence):
    assert found(values) == [sentence]


@pytest.mark.parametrize("values", POSSIBLE.values(), ids=POSSIBLE)
def test_what_can_work_is_not_told(values):
    assert found(values) == []


def test_all_of_it_is_told_at_once():
    values = layout(8, **{TP: 8, CP: 1, EP: 3}) | {"model.num_attention_heads": 12, "data.seq_length": 64}
    values |= {"model.vocab_size": 257}
    assert len(found(values)) == 4


def test_a_rule_keeps_silent_where_a_value_is_wrong():
    values = layout(3) | {"data.global_batch_size": 8}
    assert found(values) == [], "no micro-batch size was read"
    del values["distributed_strategy.zero1"]
    assert found(values | batches(8) | {"model.num_layers": 3}) == [], "a size may be the wrong one"


def test_the_report_says_where_and_what_to_do(report, good):
    assert report(good, "trainer.devices=8", f"distributed_strategy.{TP}=8", "model.vocab_size=264") == [
        f"command line: distributed_strategy.{TP}: 4 does not divide by tensor_model_parallel_size 8. Choose a tensor"
        " parallel size that divides 4, or set distributed_strategy.pad_heads to true. [NXDT-C016]"
    ]


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        ([f"distributed_strategy.{PP}=4", "data.global_batch_size=3"], "Write 4 for 4 micro-batches of 1"),
        (
            [f"distributed_strategy.{PP}=2", "trainer.devices=4", "data.global_batch_size=2"],
            "Write 4 for 2 micro-batches of 1",
        ),
    ],
)
def test_the_advice_about_micro_batches_works(report, good, overrides, advice):
    base = ["trainer.devices=4", "model.num_layers=4", "data.micro_batch_size=1"]
    rows = report(good, *base, *overrides)
    assert len(rows) == 1
    assert advice in rows[0]
    size = rows[0].partition("Write ")[2].split()[0]
    assert report(good, *base, *overrides, f"data.global_batch_size={size}") == []


IDLE = {
    "sequence parallelism": (
        ["distributed_strategy.sequence_parallel=true", "distributed_strategy.pad_heads=true"],
        "distributed_strategy.sequence_parallel, distributed_strategy.pad_heads: no effect, since"
        " distributed_strategy.tensor_model_parallel_size is 1",
    ),
    "pipeline": (
        [f"distributed_strategy.{VPP}=2", f"distributed_strategy.{SCHEDULE}=zbv", "model.pipeline_cuts=[layers.0]"],
        "distributed_strategy.virtual_pipeline_model_parallel_size, distributed_strategy.pipeline_schedule,"
        " model.pipeline_cuts: no effect, since distributed_strategy.pipeline_model_parallel_size is 1",
    ),
    "context": (
        ["distributed_strategy.context_parallel_method=ring"],
        "distributed_strategy.context_parallel_method: no effect, since"
        " distributed_strategy.context_parallel_size is 1",
    ),
    "surplus copies": (
        [
            "trainer.devices=2",
            f"distributed_strategy.{TP}=2",
            "model.num_kv_heads=2",
            "distributed_strategy.kv_replicator=2",
        ],
        "distributed_strategy.kv_replicator: no copies are made, since distributed_strategy.tensor_model_parallel_size"
        " is 2 and model.num_kv_heads 2",
    ),
    "nobody to shard over": (
        ["trainer.devices=2", f"distributed_strategy.{TP}=2", "distributed_strategy.zero_stage=3"],
        "distributed_strategy.zero_stage: no effect, since the layout leaves no data parallel ranks to shard over",
    ),
    "replicas of nothing": (
        ["trainer.devices=4", "distributed_strategy.dp_replicate=2", "distributed_strategy.zero1=false"],
        "distributed_strategy.dp_replicate: no effect, since distributed_strategy.zero1 is false and every data"
        " parallel rank holds a whole copy",
    ),
    "recompute names": (
        ["model.activations_checkpoint_recompute=[CoreAttention]"],
        "model.activations_checkpoint_recompute: no effect, since model.activations_checkpoint_granularity is not set",
    ),
    "a pipeline that waits": (
        [
            "trainer.devices=2",
            "model.num_layers=4",
            "data.global_batch_size=2",
            f"distributed_strategy.{PP}=2",
            f"distributed_strategy.{SCHEDULE}=zbv",
        ],
        "data.global_batch_size: the schedule zbv over 2 pipeline ranks is idle for longer than it need be with 2"
        " micro-batches per step; 3 fill it",
    ),
}


@pytest.mark.parametrize(("overrides", "note"), IDLE.values(), ids=IDLE)
def test_settings_that_the_layout_makes_idle_are_noted(load, good, overrides, note):
    assert load(good, *overrides).notes == (note,)


def test_defaults_of_a_parallel_run_are_not_noted(load, good):
    assert load(good, "trainer.devices=2").notes == ()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """``installed("2.9.1")`` puts a distribution of torch with that version first on the path."""

    def put(version):
        metadata = tmp_path / f"torch-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return put


@pytest.mark.parametrize("version", ["2.9.1", "2.9.1+cpu"])
def test_what_the_installed_torch_lacks_is_refused(installed, version):
    installed(version)
    assert found(layout(2, **{PP: 2, SCHEDULE: "zbv"})) == [
        f"the schedule zbv needs torch>=2.10, and torch {version} is installed."
    ]
    assert found(layout(4, **{TP: 4}) | {"model.num_kv_heads": 2}) == [
        "2 key and value heads over tensor_model_parallel_size 4 are copied, which needs torch>=2.10, and torch"
        f" {version} is installed."
    ]
    experts = {"model.moe.num_experts": 4}
    assert found(layout(4, **{TP: 2, EP: 2}) | experts) == [
        f"expert_model_parallel_size 2 with tensor_model_parallel_size 2 needs torch>=2.10, and torch {version} is"
        " installed."
    ]
    chunks = experts | {"model.moe.exchange_chunks": 2}
    assert found(layout(2, **{EP: 2}) | chunks | {"model.compile": True}) == [
        f"2 exchange_chunks in compiled layers need torch>=2.11, and torch {version} is installed."
    ]
    assert found(layout(2, **{EP: 2}) | chunks | {"model.compile": False}) == []
    assert found(layout(2, **{TP: 2}) | {"model.num_kv_heads": 2}) == []
    assert found(layout(2, **{PP: 2, VPP: 2})) == []
    assert found(layout(2, **{SCHEDULE: "zbv"})) == []


@pytest.mark.parametrize("version", ["2.10.0", "2.11.0+cu130", "2.14.1"])
def test_newer_versions_of_torch_lack_less(installed, version):
    installed(version)
    assert found(layout(2, **{PP: 2, SCHEDULE: "zbv"})) == []
    assert found(layout(4, **{TP: 4}) | {"model.num_kv_heads": 2}) == []
    experts = {"model.moe.num_experts": 4}
    assert found(layout(4, **{TP: 2, EP: 2}) | experts) == []
    chunks = experts | {"model.moe.exchange_chunks": 2, "model.compile": True}
    assert bool(found(layout(2, **{EP: 2}) | chunks)) == version.startswith("2.10")
