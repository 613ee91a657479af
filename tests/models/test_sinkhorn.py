"""The balanced assignment."""

from __future__ import annotations

import pytest
import torch

from nxdt_core.models.moe.sinkhorn import SinkhornRouter, sinkhorn_offsets
from nxdt_core.protocols.step_context import StepContext


@pytest.fixture
def logits():
    """Of 64 tokens that all like the first of 4 experts best."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(64, 4, generator=generator, dtype=torch.float64) + torch.tensor([6.0, 0.0, -2.0, 1.0])


def test_offsets_give_every_expert_an_equal_share(logits):
    shares = (logits + sinkhorn_offsets(logits, iterations=200)).softmax(1).sum(0)
    torch.testing.assert_close(shares, torch.full((4,), 16.0, dtype=torch.float64))


def test_more_iterations_than_the_tolerance_asks_for_change_nothing(logits):
    rough = sinkhorn_offsets(logits, iterations=200, tolerance=0.1)
    assert torch.equal(rough, sinkhorn_offsets(logits, iterations=400, tolerance=0.1))
    assert not torch.equal(rough, sinkhorn_offsets(logits, iterations=200))


def test_padding_moves_no_token_to_another_expert(logits):
    router = SinkhornRouter(4, 4, balance_coefficient=0.1).double()
    router.weight.data = torch.eye(4, dtype=torch.float64)
    alone = router(logits[None])
    padded = torch.cat([logits, logits[:1].expand(64, 4)])[None]
    among = router(padded, StepContext(padding=torch.arange(128)[None] >= 64))
    assert torch.equal(among.experts[:64], alone.experts)
    torch.testing.assert_close(among.weights[:64], alone.weights)
    assert among.weights[64:].abs().max() == 0
    torch.testing.assert_close(among.aux_loss, alone.aux_loss)
    assert router.statistics.assigned.tolist() == alone.counts.tolist()


def test_logits_that_exp_cannot_hold_are_no_matter(logits):
    assert sinkhorn_offsets(logits * 200, iterations=30).isfinite().all()


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_training_balances_and_evaluation_takes_the_best(logits, activation):
    router = SinkhornRouter(4, 4, activation=activation, iterations=100)
    router.weight.data = torch.eye(4)
    hidden = logits.float()[None]
    routing = router(hidden)
    assert routing.counts.max() <= 24
    best = router.eval()(hidden)
    assert best.counts[0] > 55
    assert torch.equal(best.experts[:, 0], logits.argmax(1))
    every = {"sigmoid": hidden[0].sigmoid(), "softmax": hidden[0].softmax(1)}[activation]
    torch.testing.assert_close(routing.weights, every.gather(1, routing.experts))
    routing.weights.sum().backward()
    assert router.weight.grad.abs().max() > 0
