"""The matrix can fail: layouts that train like others but hold more are told from them, and so are wrong numbers."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.engine.matrix.judgement import computed_wrong, held_in_excess
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import train
from tests.sampling import slow

STEPS = 3

REPLICATED = Layout(dp=2, zero=0)
"""Every rank holds everything, and all losses agree."""


@pytest.fixture(scope="module")
def reported(ranks):
    """``reported(layout)``: what its ranks report; each layout trains once."""
    return cache(lambda layout: ranks(layout.world).run(train, layout, "float64", STEPS, timeout_s=120))


@pytest.mark.parametrize(
    ("claimed", "real", "complaint"),
    [
        (Layout(dp=2, zero=1), REPLICATED, "optimizer state: 512512 bytes instead of 256256"),
        slow(Layout(dp=2, zero=2), REPLICATED, "gradients: 256256 bytes instead of 128128"),
        slow(Layout(dp=2, zero=2), Layout(dp=2, zero=1), "gradients between micro-batches"),
        slow(Layout(dp=2, zero=3), REPLICATED, "layers.0.attention.q_proj.weight: 8192 bytes instead of 4096"),
        slow(Layout(dp=2, zero=3), Layout(dp=2, zero=2), "layers.0.attention.q_proj.weight after forward"),
        slow(Layout(tp=2), REPLICATED, "embed_tokens.weight: 16384 bytes instead of 8192"),
        slow(Layout(tp=2), REPLICATED, "layers.3.attention.k_proj gives out [(3, 24, 16)], not 8 features"),
        (Layout(tp=2, sp=True), REPLICATED, "layers.0.mlp_norm works on [(3, 24, 32)], not on 12 of 24 positions"),
        slow(
            Layout(tp=2, sp=True), Layout(tp=2), "layers.0.mlp_norm works on [(3, 24, 32)], not on 12 of 24 positions"
        ),
        (Layout(pp=2), REPLICATED, "rank 0: holds layers.2.attention.k_proj.weight, layers.2.attention.o_proj.weight"),
        slow(Layout(pp=2, zbv=True), Layout(pp=2), "rank 0: holds layers.1."),
        slow(Layout(cp=2, cp_method="ring"), Layout(dp=2), "layers.0 gives out whole sequences"),
        slow(Layout(cp=2, cp_method="gather"), Layout(dp=2), "whole sequences are kept for backward"),
        slow(
            Layout(dp=2, ep=2, moe=True), Layout(dp=2, zero=0, moe=True), "layers.0.moe.experts.gate_proj: 32768 bytes"
        ),
        slow(Layout(dp=4), Layout(dp=4, replicas=2), "optimizer state: 256256 bytes instead of 128128"),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_a_layout_that_holds_more_than_it_claims_is_told(reported, alone, claimed, real, complaint):
    reports, reference = reported(real), alone(real, "float64", STEPS)
    assert computed_wrong("float64", reports, reference) == []
    assert held_in_excess(real, "float64", reports, reference) == []
    told = held_in_excess(claimed, "float64", reports, reference)
    assert any(complaint in text for text in told), "\n".join(told)


def changed(tensors, change):
    name = sorted(tensors)[0]
    return {**tensors, name: change(tensors[name])}


@pytest.mark.parametrize(
    ("mutant", "told"),
    [
        (lambda r: replace(r, losses=[*r.losses[:-1], r.losses[-1] + 2e-9]), "loss: off by 2.0e-09 from step 2"),
        (lambda r: replace(r, losses=[float("nan"), *r.losses[1:]]), "loss: off by nan from step 0"),
        (lambda r: replace(r, norms=[r.norms[0] * 2, *r.norms[1:]]), "gradient norm: off by 1.6e+00 from step 0"),
        (lambda r: replace(r, weight_norms=[*r.weight_norms[:-1], 0.0]), "norm of the weights: off by"),
        (lambda r: replace(r, gradients=changed(r.gradients, lambda g: g * 2)), "gradient of embed_tokens.weight: off"),
        (lambda r: replace(r, weights=changed(r.weights, lambda w: w + 2e-9)), "embed_tokens.weight: off by 2.0e-09"),
        (lambda r: replace(r, weights=changed(r.weights, lambda w: w[:, :-1])), "shape (64, 31) instead of (64, 32)"),
        (lambda r: replace(r, weights=changed(r.weights, lambda w: w * torch.nan)), "embed_tokens.weight: off by nan"),
        (lambda r: replace(r, weights=dict(list(r.weights.items())[1:])), "no rank has embed_tokens.weight"),
        (lambda r: replace(r, gradients=dict(list(r.gradients.items())[1:])), "no rank has embed_tokens.weight"),
    ],
)
def test_numbers_that_differ_are_told(alone, mutant, told):
    reference = alone(REPLICATED, "float64", STEPS)
    assert computed_wrong("float64", [reference], reference) == []
    wrong = computed_wrong("float64", [mutant(reference)], reference)
    assert len(wrong) == 1
    assert told in wrong[0]
