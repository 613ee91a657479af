"""With dropout a layout trains as one process does: masks follow from positions.

``--samples`` decides which of the cases run (tests/sampling.py). Masks of attention probabilities are left out: they
differ by rank.
"""

from tests.engine.layouts.adapting import KINDS, numbers_of, sized
from tests.engine.matrix.judgement import computed_wrong
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import train
from tests.sampling import sampled

STEPS = 4
MODELS = {name: KINDS[name] for name in KINDS if name.endswith("-dropout")}
MODELS["gpt-dropout"] = (KINDS["fused-dropout"][0] | {"hidden_dropout": 0.3, "ffn_dropout": 0.3}, None)
MODELS["gpt-gated-dropout"] = (MODELS["gpt-dropout"][0] | {"activation": "swiglu", "hidden_dropout": 0.0}, None)
_MOE = KINDS["experts-dropout"][0]
MODELS["moe-dropout"] = (_MOE | {"moe": {**_MOE["moe"], "dropout": 0.3}}, None)
MODELS["moe-capacity-dropout"] = (_MOE | {"moe": {**_MOE["moe"], "dropout": 0.3, "capacity_factor": 4.0}}, None)
MODELS["moe-chunks-dropout"] = (_MOE | {"moe": {**_MOE["moe"], "dropout": 0.3, "exchange_chunks": 2}}, None)
TP2, TP2_SP, EP2 = Layout(tp=2), Layout(tp=2, sp=True), Layout(dp=2, ep=2)
CASES = {
    "linear-dp2": ("linear-dropout", Layout(dp=2)),
    "linear-zero3": ("linear-dropout", Layout(dp=2, zero=3)),
    "linear-tp2": ("linear-dropout", TP2),
    "linear-tp2-sp": ("linear-dropout", TP2_SP),
    "linear-pp2": ("linear-dropout", Layout(pp=2)),
    "linear-pp2-interleaved": ("linear-dropout", Layout(pp=2, vpp=2)),
    "linear-pp2-recomputed": ("linear-dropout", Layout(pp=2, recompute="full")),
    "linear-cp2-ring": ("linear-dropout", Layout(cp=2, cp_method="ring")),
    "linear-cp2-gather": ("linear-dropout", Layout(cp=2, cp_method="gather")),
    "linear-cp2-tp2-sp": ("linear-dropout", Layout(cp=2, cp_method="ring", tp=2, sp=True)),
    "linear-recomputed": ("linear-dropout", Layout(dp=2, zero=3, recompute="full")),
    "linear-dp2-tp2-pp2": ("linear-dropout", Layout(dp=2, tp=2, sp=True, pp=2, zero=3)),
    "linear-packed-tp2": ("linear-dropout", Layout(tp=2, packed=True)),
    "dora-tp2": ("dora-dropout", TP2),
    "dora-tp2-sp": ("dora-dropout", TP2_SP),
    "fused-tp2-sp": ("fused-dropout", TP2_SP),
    "fused-zero1": ("fused-dropout", Layout(dp=2)),
    "hf-tp2-sp": ("hf-dropout", TP2_SP),
    "hf-zero2": ("hf-dropout", Layout(dp=2, zero=2)),
    "gpt-tp2": ("gpt-dropout", TP2),
    "gpt-tp2-sp": ("gpt-dropout", TP2_SP),
    "gpt-pp2": ("gpt-dropout", Layout(pp=2)),
    "gpt-cp2": ("gpt-dropout", Layout(cp=2, cp_method="ring")),
    "gpt-zero3-recomputed": ("gpt-dropout", Layout(dp=2, zero=3, recompute="full")),
    "gpt-gated-tp2": ("gpt-gated-dropout", TP2),
    "experts-dp2": ("experts-dropout", Layout(dp=2)),
    "experts-ep2": ("experts-dropout", EP2),
    "experts-tp2": ("experts-dropout", TP2),
    "experts-tp2-sp": ("experts-dropout", TP2_SP),
    "experts-pp2": ("experts-dropout", Layout(pp=2)),
    "experts-cp2": ("experts-dropout", Layout(cp=2, cp_method="ring")),
    "experts-ep2-tp2-sp": ("experts-dropout", Layout(dp=2, ep=2, tp=2, sp=True)),
    "experts-ep2-zero3": ("experts-dropout", Layout(dp=4, ep=2, zero=3)),
    "experts-ep2-recomputed": ("experts-dropout", Layout(dp=2, ep=2, recompute="full")),
    "moe-ep2": ("moe-dropout", EP2),
    "moe-tp2": ("moe-dropout", TP2),
    "moe-chunks-ep2": ("moe-chunks-dropout", EP2),
    "moe-chunks-ep2-tp2-selective": ("moe-chunks-dropout", Layout(dp=2, ep=2, tp=2, recompute="LlamaMLP")),
    "moe-capacity-ep2": ("moe-capacity-dropout", EP2),
    "hf-experts-ep2": ("hf-experts-dropout", EP2),
    "hf-experts-tp2": ("hf-experts-dropout", TP2),
}
SAMPLE = 2


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", sampled(metafunc.config, CASES, SAMPLE, default=("gpt-cp2", "experts-ep2")))


def test_a_layout_drops_what_one_process_drops(ranks, alone, steps, case):
    kind, layout = CASES[case]
    model, adapter = MODELS[kind]
    model = sized(model, layout)
    numbers = numbers_of(kind)
    reports = ranks(layout.world).run(train, layout, numbers, steps(STEPS), model, adapter, timeout_s=240)
    reference = alone(layout, numbers, steps(STEPS), model, adapter)
    wrong = computed_wrong(numbers, reports, reference)
    assert not wrong, "\n".join(wrong)


def test_the_masks_matter(alone, steps):
    model, adapter = sized(MODELS["gpt-dropout"][0], Layout()), None
    dropped = alone(Layout(), "float64", steps(STEPS), model, adapter)
    plain = alone(Layout(), "float64", 2, {**model, "hidden_dropout": 0.0, "ffn_dropout": 0.0}, adapter)
    assert abs(dropped.losses[0] - plain.losses[0]) > 1e-4
