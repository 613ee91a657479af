"""What the engine does not declare, or cannot lay out, is a configuration error, without the library."""

from __future__ import annotations

import pytest

from nxdt_core.config import load
from nxdt_core.errors.configuration import CapabilityMissing, ConfigError, ImpossibleCombination

_STRATEGY = "distributed_strategy"
_VPP = f"{_STRATEGY}.virtual_pipeline_model_parallel_size"
_TP, _PP = f"{_STRATEGY}.tensor_model_parallel_size", f"{_STRATEGY}.pipeline_model_parallel_size"
RUN = ("parallel_engine.name=nxd", f"{_STRATEGY}.zero1=false")

UNDECLARED = {
    "cp": ("trainer.devices=2", f"{_STRATEGY}.context_parallel_size=2"),
    "compile": ("model.compile=true",),
}
IMPOSSIBLE = {
    "heads": ("trainer.devices=8", f"{_TP}=8", "4 is not divisible by tensor_model_parallel_size 8"),
    "columns": ("trainer.devices=2", f"{_TP}=2", "model.ffn_hidden_size=175", "175 is not divisible"),
    "tokens": (
        "trainer.devices=2",
        f"{_TP}=2",
        f"{_STRATEGY}.sequence_parallel=true",
        "data.seq_length=127",
        "127 is not",
    ),
    "key heads": (
        *(
            "trainer.devices=4",
            f"{_TP}=4",
            "model.num_attention_heads=12",
            "model.num_kv_heads=3",
            "model.hidden_size=96",
        ),
        "3 key and value heads can be neither divided nor copied",
    ),
    "layers": ("trainer.devices=3", f"{_PP}=3", "4 layers are not divisible by pipeline_model_parallel_size 3"),
    "virtual layers": (
        "trainer.devices=2",
        f"{_PP}=2",
        f"{_VPP}=4",
        "4 layers are not divisible by 8 stages, 4 on each",
    ),
    "cuts": ("trainer.devices=2", f"{_PP}=2", "model.pipeline_cuts=[layers.0,layers.1]", "2 cuts make 3 stages"),
    "micro-batches": ("trainer.devices=4", f"{_PP}=4", "data.micro_batch_size=8", "needs at least 4"),
    "rounds": (
        *("trainer.devices=2", f"{_PP}=2", f"{_VPP}=2", "data.global_batch_size=9", "data.micro_batch_size=3"),
        "needs a multiple of 2",
    ),
    "schedule": (
        *("trainer.devices=2", f"{_PP}=2", f"{_VPP}=2", f"{_STRATEGY}.pipeline_schedule=1f1b"),
        "the schedule 1f1b does not run 2 stages",
    ),
    "rounding": ("precision.type=bf16SR", "precision.optimizer_state=bfloat16", "bf16SR keeps none"),
    "zero3": ("trainer.devices=2", f"{_STRATEGY}.zero_stage=3", "shards optimizer state alone"),
    "zero in groups": (
        *("trainer.devices=4", f"{_STRATEGY}.zero_stage=1", f"{_STRATEGY}.dp_replicate=2"),
        "shards over all data parallel ranks",
    ),
    "zbv": ("trainer.devices=2", f"{_PP}=2", f"{_STRATEGY}.pipeline_schedule=zbv", "does not run this schedule"),
    "pad_heads": ("trainer.devices=2", f"{_TP}=2", f"{_STRATEGY}.pad_heads=true", "adds no attention heads"),
    "gathered again": (
        *("trainer.devices=2", f"{_TP}=2", f"{_STRATEGY}.sequence_parallel=true"),
        *(f"{_STRATEGY}.sequence_parallel_regather=true", "keeps gathered inputs"),
    ),
    "token shuffle": ("trainer.devices=2", f"{_STRATEGY}.token_shuffle_group_size=2", "mixes no tokens"),
    "state": ("precision.type=bf16SR", "keeps optimizer state in the dtype of what it updates"),
    "asynchronous": (f"{_STRATEGY}.async_tensor_parallel=true", "no asynchronous tensor parallelism"),
    "loss chunks": ("model.loss_chunk_tokens=64", "computes the losses of a micro-batch at once"),
}


@pytest.mark.parametrize("capability", UNDECLARED)
def test_what_is_not_declared_is_refused(capability: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load("recipe:llama-tiny", [*RUN, *UNDECLARED[capability]])
    lacks = {problem.capability for problem in raised.value.problems if isinstance(problem, CapabilityMissing)}
    assert capability in lacks


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_layout_that_does_not_divide_is_refused(case: str) -> None:
    *overrides, words = IMPOSSIBLE[case]
    with pytest.raises(ConfigError) as raised:
        load("recipe:llama-tiny", [*RUN, *overrides])
    found = [problem for problem in raised.value.problems if isinstance(problem, ImpossibleCombination)]
    assert [problem for problem in found if words in str(problem)], [str(problem) for problem in raised.value.problems]


def test_experts_that_do_not_divide_are_refused() -> None:
    ranks = ("trainer.devices=3", f"{_STRATEGY}.expert_model_parallel_size=3", "data.global_batch_size=24")
    with pytest.raises(ConfigError, match="experts are not divisible by expert_model_parallel_size 3"):
        load("recipe:mixtral-tiny", [*RUN, *ranks])


def test_chunks_of_tokens_are_refused() -> None:
    ranks = ("trainer.devices=2", f"{_STRATEGY}.expert_model_parallel_size=2", "model.moe.exchange_chunks=2")
    with pytest.raises(ConfigError, match="sends all tokens of a layer at once"):
        load("recipe:mixtral-tiny", [*RUN, *ranks])


def test_layouts_that_are_declared_load() -> None:
    both = ("trainer.devices=8", f"{_TP}=2", f"{_PP}=2", f"{_VPP}=2", f"{_STRATEGY}.sequence_parallel=true")
    assert load("recipe:llama-tiny", [*RUN, *both]).run.distributed_strategy.mesh_sizes(8).dp == 2
