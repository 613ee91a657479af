"""What the engine does not declare, or cannot lay out, is a configuration error, without the library."""

from __future__ import annotations

import pytest

from nxdt_core.config import load
from nxdt_core.errors.configuration import CapabilityMissing, ConfigError, ImpossibleCombination

_STRATEGY = "distributed_strategy"
_TP, _PP = f"{_STRATEGY}.tensor_model_parallel_size", f"{_STRATEGY}.pipeline_model_parallel_size"
RUN = ("parallel_engine.name=nxd", f"{_STRATEGY}.zero1=false")

UNDECLARED = {
    "zero3": ("trainer.devices=2", f"{_STRATEGY}.zero_stage=3"),
    "cp": ("trainer.devices=2", f"{_STRATEGY}.context_parallel_size=2"),
    "vpp": ("trainer.devices=2", f"{_PP}=2", f"{_STRATEGY}.virtual_pipeline_model_parallel_size=2"),
    "pp:zbv": ("trainer.devices=2", f"{_PP}=2", f"{_STRATEGY}.pipeline_schedule=zbv"),
    "pad_heads": ("trainer.devices=2", f"{_TP}=2", f"{_STRATEGY}.pad_heads=true"),
    "compile": ("model.compile=true",),
    "ep": ("trainer.devices=2", f"{_STRATEGY}.expert_model_parallel_size=2"),
    "stochastic_rounding": ("precision.type=bf16SR",),
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
    "cuts": ("trainer.devices=2", f"{_PP}=2", "model.pipeline_cuts=[layers.0,layers.1]", "2 cuts make 3 stages"),
    "micro-batches": ("trainer.devices=4", f"{_PP}=4", "data.micro_batch_size=8", "needs at least 4"),
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


def test_layouts_that_are_declared_load() -> None:
    both = ("trainer.devices=8", f"{_TP}=2", f"{_PP}=2", f"{_STRATEGY}.sequence_parallel=true")
    assert load("recipe:llama-tiny", [*RUN, *both]).run.distributed_strategy.mesh_sizes(8).dp == 2
