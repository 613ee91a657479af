"""An adapter that was saved in one layout goes on in another, and merges there, as one run of one process does.

``--samples`` decides which of the cases run (tests/sampling.py).
"""

import pytest
import torch

from nxdt_core import checkpoint
from tests.engine.layouts.adapting import MERGED, go_on, numbers_of
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.parity import TOLERANCES
from tests.sampling import sampled

ONE, DP2, TP2, PP2 = Layout(), Layout(dp=2), Layout(tp=2), Layout(pp=2)
ZERO3, EP2 = Layout(dp=2, zero=3), Layout(dp=2, ep=2)
CASES = {
    "linear-dp2-tp2": ("linear", DP2, TP2),
    "linear-tp2-pp2": ("linear", TP2, PP2),
    "linear-pp2-zero3": ("linear", PP2, ZERO3),
    "linear-zero3-one": ("linear", ZERO3, ONE),
    "linear-one-dp2": ("linear", ONE, DP2),
    "dora-tp2-zero3": ("dora", TP2, ZERO3),
    "dora-zero3-tp2": ("dora", ZERO3, TP2),
    "vocabulary-pp2-tp2": ("vocabulary", PP2, TP2),
    "vocabulary-dora-tp2-zero3": ("vocabulary-dora", TP2, ZERO3),
    "whole-tp2-pp2": ("whole", TP2, PP2),
    "experts-ep2-tp2": ("experts", EP2, TP2),
    "experts-tp2-ep2": ("experts", TP2, EP2),
    "experts-pp2-ep2": ("experts", PP2, EP2),
    "experts-ep2-zero3": ("experts", EP2, ZERO3),
    "hf-tp2-dp2": ("hf", TP2, DP2),
    "hf-experts-ep2-tp2": ("hf-experts", EP2, TP2),
    "hf-experts-zero3-ep2": ("hf-experts", ZERO3, EP2),
}
SAMPLE = 1
BEFORE, AFTER = 2, 2


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", sampled(metafunc.config, CASES, SAMPLE, default=("linear-tp2-pp2",)))


@pytest.fixture(scope="module")
def unbroken(ranks, tmp_path_factory):
    """``unbroken(kind)``: what one process says that takes all steps, and the weights that it merges."""
    known = {}

    def of(kind):
        if kind not in known:
            where = tmp_path_factory.mktemp(kind) / "checkpoints"
            (went,) = ranks(1).run(go_on, kind, ONE, BEFORE + AFTER, where, False, True, timeout_s=240)
            known[kind] = went, merged(where)
        return known[kind]

    return of


def merged(directory):
    storage = checkpoint.open_storage(str(directory.with_name(MERGED)))
    return checkpoint.load_model(storage, checkpoint.find_checkpoint(storage, BEFORE + AFTER, warn=print))


def test_an_adapter_goes_on_and_merges_in_another_layout(ranks, unbroken, tmp_path, case):
    kind, before, after = CASES[case]
    where, tolerance = tmp_path / "checkpoints", TOLERANCES[numbers_of(kind)]
    first = ranks(before.world).run(go_on, kind, before, BEFORE, where, False, False, timeout_s=240)
    second = ranks(after.world).run(go_on, kind, after, AFTER, where, True, True, timeout_s=240)
    reference, weights = unbroken(kind)
    for legs, expected in ((first, reference.losses[:BEFORE]), (second, reference.losses[BEFORE:])):
        for went in legs:
            assert went.losses == pytest.approx(expected, rel=0, abs=tolerance.loss)
    assert {name for went in second for name in went.trained} == reference.trained.keys()
    for went in second:
        for name, trained in went.trained.items():
            torch.testing.assert_close(trained, reference.trained[name], rtol=0, atol=tolerance.weight)
    found = merged(where)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=tolerance.weight)
