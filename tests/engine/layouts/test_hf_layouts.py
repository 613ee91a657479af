"""Models that transformers builds train in every kind of layout as one process trains them.

``--samples`` decides which families and cases run (tests/sampling.py). Families share the processes of a case,
whose imports of transformers cost more than the training.
"""

from contextlib import nullcontext
from functools import cache

import pytest
from nxdt_testing.ranks import process_group

from tests.engine.matrix.judgement import computed_wrong
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import Report, train
from tests.sampling import sampled

DENSE = ("qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "cohere")
SPARSE = ("qwen2-moe", "qwen3-moe", "olmoe", "glm4-moe", "deepseek-v2", "deepseek-v3", "granitemoe", "gpt-oss")
BALANCED = ("qwen3-moe balanced", "olmoe balanced", "gpt-oss balanced")
"""With the auxiliary loss of the routers."""
FAMILIES = (*DENSE, *SPARSE)
STEPS = 4
FAMILIES_OF_A_CASE = 2

CASES = {
    "tp2-sp-packed": (FAMILIES, Layout(tp=2, sp=True, packed=True)),
    "tp4-sp": (("qwen3", "olmo2", "qwen3-moe", "cohere", "gpt-oss"), Layout(tp=4, sp=True)),
    "tp2-balanced-packed": (BALANCED, Layout(tp=2, packed=True)),
    "tp2-sp-balanced": (BALANCED, Layout(tp=2, sp=True)),
    "pp2": ((*DENSE, "qwen3-moe", "glm4-moe", "deepseek-v3", "gpt-oss"), Layout(pp=2)),
    "pp2-tp2": (("gemma3", "phi3"), Layout(pp=2, tp=2)),
    "pp2-interleaved": (("gemma2",), Layout(pp=2, vpp=2)),
    "cp2": (("qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "cohere", *SPARSE), Layout(cp=2, cp_method="ring")),
    "dp2-zero2": (SPARSE, Layout(dp=2, zero=2)),
    "dp2-tp2-zero3-norms": (("cohere",), Layout(dp=2, tp=2, zero=3, recompute="full")),
    "dp2-zero3-recomputed-packed": (("gemma2", "phi3", *BALANCED), Layout(dp=2, zero=3, recompute="full", packed=True)),
    "dp2-tp2": (("gemma3", "olmo2", "olmoe"), Layout(dp=2, tp=2)),
    "dp2-ep2": ((*SPARSE, *BALANCED), Layout(dp=2, ep=2)),
    "dp2-ep2-zero3": (SPARSE, Layout(dp=2, ep=2, zero=3)),
    "dp2-ep2-tp2-sp": ((*SPARSE, "olmoe balanced"), Layout(dp=2, ep=2, tp=2, sp=True)),
    "dp2-ep2-pp2": (("qwen3-moe", "gpt-oss"), Layout(dp=2, ep=2, pp=2)),
    "cp2-ep2": (SPARSE, Layout(cp=2, ep=2, cp_method="ring")),
}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        (*cases,) = sampled(metafunc.config, CASES, 1, default=("tp2-sp-packed",))
        of_each = {"default": ("qwen3-moe",)} if cases == ["tp2-sp-packed"] else {}
        some = [tuple(sampled(metafunc.config, CASES[case][0], FAMILIES_OF_A_CASE, **of_each)) for case in cases]
        metafunc.parametrize(("case", "some"), list(zip(cases, some, strict=True)), ids=cases)
    if "families" in metafunc.fixturenames:
        metafunc.parametrize("families", [tuple(sampled(metafunc.config, FAMILIES, 2))], ids="-".join)


def train_each(families: tuple[str, ...], layout: Layout, steps: int) -> dict[str, Report]:
    """Train the tiny model of each family, one after the other, on this rank."""
    with process_group(timeout_s=120) if layout.world > 1 else nullcontext():  # engines use the group that there is
        return {family: train(layout, "fp32", steps, _model(family)) for family in families}


def _model(family: str) -> dict:
    name, _, balanced = family.partition(" ")
    path = f"package://nxdt_plugin_hf/configs/{name}-tiny"
    balance = {"output_router_logits": True, "router_aux_loss_coef": 0.1} if balanced else {}
    return {"name": "hf", "model_config": path, "hf_config": {"initializer_range": 0.1, **balance}}


@pytest.fixture(scope="module")
def alone(ranks, steps):
    """``alone(families, layout)``: what one process reports of each family; ``layout`` is that of one."""

    @cache
    def run(families: tuple[str, ...], layout: Layout) -> dict[str, Report]:
        (reports,) = ranks(1).run(train_each, families, layout, steps(STEPS), timeout_s=240)
        return reports

    return run


def _compare(ranks, alone, families, layout, steps):
    references = alone(families, layout.one_process)
    reports = ranks(layout.world).run(train_each, families, layout, steps, timeout_s=240)
    wrong = [
        f"{family}: {text}"
        for family in families
        for text in computed_wrong("fp32", [report[family] for report in reports], references[family])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_two_tensor_parallel_ranks_train_a_family_as_one_process_does(ranks, alone, steps, families):
    _compare(ranks, alone, families, Layout(tp=2), steps(STEPS))


def test_a_layout_trains_as_one_process_does(ranks, alone, steps, case, some):
    _, layout = CASES[case]
    _compare(ranks, alone, some, layout, steps(STEPS))
