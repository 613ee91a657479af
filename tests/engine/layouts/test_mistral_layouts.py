"""A Mistral, whose window is shorter than a context parallel rank's chunk, trains in every layout as in one process.

``--samples`` decides which of the cases run (tests/sampling.py).
"""

from tests.engine.matrix.judgement import computed_wrong
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import train
from tests.sampling import sampled

MISTRAL = {
    "name": "mistral",
    "hidden_size": 32,
    "ffn_hidden_size": 40,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 26,
    "sliding_window": 5,
    "init_method_std": 0.1,
}
STEPS = 8
LAYOUTS = (
    Layout(dp=2, zero=3),
    Layout(tp=2, sp=True, packed=True),
    Layout(tp=4),
    Layout(pp=2, tp=2),
    Layout(pp=2, vpp=2, packed=True),
    Layout(cp=2, cp_method="ring"),
    Layout(cp=2, cp_method="ring", packed=True),
    Layout(cp=2, cp_method="gather"),
    Layout(cp=4, cp_method="ring"),
    Layout(cp=4, cp_method="gather", packed=True),
    Layout(tp=2, sp=True, recompute="CoreAttention"),
)
SAMPLE = 2


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        layouts = sampled(metafunc.config, LAYOUTS, SAMPLE, default=LAYOUTS[1:2])
        metafunc.parametrize("layout", layouts, ids=[layout.name for layout in layouts])


def test_a_layout_trains_as_one_process_does(ranks, alone, steps, layout):
    model = {**MISTRAL, "num_layers": layout.least_layers}
    reports = ranks(layout.world).run(train, layout, "float64", steps(STEPS), model, timeout_s=120)
    wrong = computed_wrong("float64", reports, alone(layout, "float64", steps(STEPS), model))
    assert not wrong, "\n".join(wrong)


def test_the_window_makes_a_difference(alone, steps):
    layout = LAYOUTS[1]
    model = {**MISTRAL, "num_layers": layout.least_layers}
    with_it, without = (
        alone(layout, "float64", steps(STEPS), each) for each in (model, {**model, "sliding_window": None})
    )
    assert abs(with_it.losses[-1] - without.losses[-1]) > 1e-3
