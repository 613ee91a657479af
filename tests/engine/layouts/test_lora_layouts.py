"""LoRA trains in every kind of layout as one process trains it, and what is frozen has neither gradients nor state.

``--samples`` decides which of the cases run (tests/sampling.py).
"""

import pytest

from tests.engine.layouts.adapting import KINDS, numbers_of, over_values, sized
from tests.engine.matrix.judgement import computed_wrong
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import train
from tests.sampling import sampled, slow

STEPS = 6
TP2, TP2_SP, PP2, EP2 = Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=2, ep=2)
CASES = {
    **{f"linear-zero{zero}": ("linear", Layout(dp=2, zero=zero)) for zero in (0, 1, 2, 3)},
    "linear-tp2": ("linear", TP2),
    "linear-tp2-sp": ("linear", TP2_SP),
    "linear-tp4-sp": ("linear", Layout(tp=4, sp=True)),
    "linear-pp2": ("linear", PP2),
    "linear-pp2-interleaved": ("linear", Layout(pp=2, vpp=2)),
    "linear-pp2-zbv": ("linear", Layout(pp=2, zbv=True)),
    "linear-cp2": ("linear", Layout(cp=2, cp_method="ring")),
    "linear-recomputed": ("linear", Layout(dp=2, zero=3, recompute="full")),
    "linear-dp2-tp2-pp2": ("linear", Layout(dp=2, tp=2, sp=True, pp=2, zero=3)),
    **{f"nf4-zero{zero}": ("nf4", Layout(dp=2, zero=zero)) for zero in (0, 1, 2)},
    "nf4-odd-zero1": ("nf4-odd", Layout(dp=2)),
    "nf4-pp2": ("nf4", PP2),
    "nf4-recomputed": ("nf4", Layout(dp=2, recompute="full")),
    "nf4-dora-zero1": ("nf4-dora", Layout(dp=2)),
    "int8-zero1": ("int8", Layout(dp=2)),
    "pissa-tp2-sp": ("pissa", TP2_SP),
    "pissa-zero1": ("pissa", Layout(dp=2)),
    "pissa-zero3": ("pissa", Layout(dp=2, tp=2, zero=3)),
    "pissa-pp2": ("pissa", PP2),
    "pissa-dora-tp2": ("pissa-dora", TP2),
    "vocabulary-tp2": ("vocabulary", TP2),
    "vocabulary-tp2-sp": ("vocabulary", TP2_SP),
    "vocabulary-tp2-zero3": ("vocabulary", Layout(dp=2, tp=2, zero=3)),
    "vocabulary-pp2": ("vocabulary", PP2),
    "tied-tp2-sp": ("tied", TP2_SP),
    "tied-pp2": ("tied", PP2),
    "last-layer-pp2": ("last-layer", PP2),
    "last-layer-zero3": ("last-layer", Layout(dp=2, zero=3)),
    "dora-tp2": ("dora", TP2),
    "dora-tp4-sp": ("dora", Layout(tp=4, sp=True)),
    "dora-zero3": ("dora", Layout(dp=2, tp=2, zero=3)),
    "vocabulary-dora-tp2": ("vocabulary-dora", TP2),
    "vocabulary-dora-tp2-sp": ("vocabulary-dora", TP2_SP),
    "vocabulary-dora-zero3": ("vocabulary-dora", Layout(dp=2, zero=3)),
    "whole-tp2-sp": ("whole", TP2_SP),
    "whole-zero2": ("whole", Layout(dp=2, zero=2)),
    "fused-tp2": ("fused", TP2),
    "fused-tp2-sp": ("fused", TP2_SP),
    "fused-biases-tp2": ("fused-biases", TP2),
    "fused-biases-zero1": ("fused-biases", Layout(dp=2)),
    "experts-ep2": ("experts", EP2),
    "experts-ep2-zero3": ("experts", Layout(dp=4, ep=2, zero=3)),
    "experts-tp2": ("experts", TP2),
    "experts-ep2-tp2-sp": ("experts", Layout(dp=2, ep=2, tp=2, sp=True)),
    "experts-ep2-pp2": ("experts", Layout(dp=2, ep=2, pp=2)),
    "hf-tp2-sp": ("hf", TP2_SP),
    "hf-zero2": ("hf", Layout(dp=2, zero=2)),
    "hf-experts-ep2": ("hf-experts", EP2),
    "hf-experts-tp2": ("hf-experts", TP2),
    "hf-experts-zero3": ("hf-experts", Layout(dp=2, zero=3)),
}
SAMPLE = 2


def needs_library(kind):
    if "base_dtype" in KINDS[kind][1]:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing can be quantised")


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize(
            "case", sampled(metafunc.config, CASES, SAMPLE, default=("pissa-tp2-sp", "vocabulary-tp2-zero3"))
        )


def test_a_layout_trains_as_one_process_does(ranks, alone, steps, case):
    kind, layout = CASES[case]
    needs_library(kind)
    model, adapter = KINDS[kind]
    model = model if kind == "last-layer" else sized(model, layout)
    reports = ranks(layout.world).run(train, layout, numbers_of(kind), steps(STEPS), model, adapter, timeout_s=240)
    reference = alone(layout, numbers_of(kind), steps(STEPS), model, adapter)
    wrong = computed_wrong(numbers_of(kind), reports, reference)
    assert not wrong, "\n".join(wrong)
    assert reference.losses[-1] < reference.losses[0] - 0.01
    trained = reference.gradients.keys()
    assert any(name.endswith("lora_B") for name in trained)
    for report in reports:
        assert report.held.gradients.keys() <= trained


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        slow("nf4", TP2_SP),
        ("nf4-odd", TP2_SP),
        slow("nf4", Layout(dp=2, tp=2)),
        slow("nf4-dora", TP2),
        slow("int8", TP2_SP),
    ],
)
def test_tensor_parallel_ranks_train_over_the_values_of_their_own_codes(ranks, kind, layout):
    needs_library(kind)
    reports = ranks(layout.world).run(over_values, kind, layout, STEPS, None, timeout_s=240)
    reference = ranks(1).run(over_values, kind, layout.one_process, STEPS, reports[0][1], timeout_s=240)[0]
    assert reference[0][-1] < reference[0][0] - 0.01
    for losses, _ in reports:
        assert losses == pytest.approx(reference[0], rel=2e-5)
