"""``model.trainable``: every kind of layout trains what it names as one process does, and freezes the rest.

``--samples`` decides which of the cases run (tests/sampling.py).
"""

import pytest
import torch
from nxdt_testing.errors import raises

from nxdt_core.errors.training import TrainableEmpty
from nxdt_core.train import build
from tests.engine.layouts.adapting import KINDS, sized
from tests.engine.matrix.judgement import computed_wrong
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import configuration, train
from tests.sampling import sampled

STEPS = 4
MODELS = {
    "top": ("linear", ("lm_head", "norm.weight", "layers.3")),
    "middle": ("linear", ("*mlp.down_proj", "layers.*.*_norm.weight")),
    "tied": ("tied", ("embed_tokens",)),
    "experts": ("experts", ("*.router", "*.q_proj.weight")),
    "hf": ("hf", ("*.q_proj", "*.v_proj.bias")),
}
CASES = {
    **{f"top-zero{zero}": ("top", Layout(dp=2, zero=zero)) for zero in (0, 1, 2, 3)},
    "top-tp2-sp": ("top", Layout(tp=2, sp=True)),
    "top-pp2": ("top", Layout(pp=2)),
    "top-pp2-zbv": ("top", Layout(pp=2, zbv=True)),
    "top-pp2-interleaved": ("top", Layout(pp=2, vpp=2)),
    "middle-cp2": ("middle", Layout(cp=2, cp_method="ring")),
    "middle-tp4-sp": ("middle", Layout(tp=4, sp=True)),
    "middle-recomputed": ("middle", Layout(dp=2, zero=3, recompute="full")),
    "middle-dp2-tp2-pp2": ("middle", Layout(dp=2, tp=2, sp=True, pp=2, zero=3)),
    "tied-pp2": ("tied", Layout(pp=2)),
    "tied-tp2-sp": ("tied", Layout(tp=2, sp=True)),
    "experts-ep2": ("experts", Layout(dp=2, ep=2)),
    "experts-ep2-zero3": ("experts", Layout(dp=4, ep=2, zero=3)),
    "hf-zero2": ("hf", Layout(dp=2, zero=2)),
    "hf-tp2-sp": ("hf", Layout(tp=2, sp=True)),
}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", sampled(metafunc.config, CASES, 2, default=("top-pp2", "top-zero3")))


def parts(name, layout):
    """The model's keys and the numbers it is trained in."""
    kind, patterns = MODELS[name]
    keys = KINDS[kind][0] if name == "top" else sized(KINDS[kind][0], layout)
    return "fp32" if kind == "hf" else "float64", {**keys, "trainable": list(patterns)}


def test_a_layout_trains_as_one_process_does(ranks, alone, steps, case):
    name, layout = CASES[case]
    numbers, model = parts(name, layout)
    reports = ranks(layout.world).run(train, layout, numbers, steps(STEPS), model, timeout_s=240)
    reference = alone(layout, numbers, steps(STEPS), model, None)
    wrong = computed_wrong(numbers, reports, reference)
    assert not wrong, "\n".join(wrong)
    for report in reports:
        assert report.held.gradients.keys() <= reference.gradients.keys()


@pytest.mark.parametrize("name", ["top", "tied"])
def test_gradients_are_those_of_the_whole_model_and_the_rest_stays(alone, name):
    numbers, model = parts(name, Layout())
    whole = alone(Layout(), numbers, 2, {key: value for key, value in model.items() if key != "trainable"}, None)
    found = alone(Layout(), numbers, 2, model, None)
    first = alone(Layout(), numbers, 2, {**model, "trainable": ["norm"]}, None).weights
    trained = {each for each in whole.gradients if each.startswith(("lm_head", "norm", "layers.3.", "embed"))}
    if name == "top":
        trained.remove("embed_tokens.weight")
    else:
        trained = {"embed_tokens.weight"}
    assert found.gradients.keys() == trained
    for each in trained:
        torch.testing.assert_close(found.gradients[each], whole.gradients[each], rtol=1e-12, atol=0)
    norm = torch.stack([gradient.norm() for gradient in found.gradients.values()]).norm()
    assert found.norms[0] == pytest.approx(float(norm))
    changed = {each for each, weight in found.weights.items() if not torch.equal(weight, first[each])}
    assert changed - {"norm.weight"} == trained - {"norm.weight"}


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["lm_hed"], "'lm_hed' matches no parameter"),
        (["norm", "layers.*.mlp.up_prj.weight"], "'layers.*.mlp.up_prj.weight' matches no parameter"),
        ([], "it is empty"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest(patterns, said):
    config = configuration(Layout(), "fp32", {**KINDS["linear"][0], "trainable": patterns})
    module = build.model_builder(config).build()
    with raises(TrainableEmpty) as caught:
        build.adapters(config)[0].apply(module, build.model_builder(config).plan())
    assert said in str(caught.value)
    nearest = {"lm_hed": "'lm_head.weight'", "layers.*.mlp.up_prj.weight": "'layers.*.mlp.up_proj.weight'"}
    assert all(nearest[each] in str(caught.value) for each in patterns if each in nearest)
