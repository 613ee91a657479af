"""The chunked cross-entropy against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from nxdt_core.models import loss as loss_module
from nxdt_core.models.loss import cross_entropy_sum

LABELS = torch.tensor([[3, -100, 0, 10], [-100, 7, 7, 1]])


def logits(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, 4, 11, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


@pytest.fixture(params=[1, 22, 10_000], ids=["a row at a time", "two rows", "all at once"], autouse=True)
def _chunk(request, monkeypatch):
    monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS_IN_CACHE", request.param)


def test_sum_and_gradient_are_those_of_torch():
    x = logits()
    total, weight = cross_entropy_sum(x, LABELS)
    expected = functional.cross_entropy(x.flatten(0, 1), LABELS.flatten(), reduction="sum")
    torch.testing.assert_close(total, expected)
    assert weight == 6
    torch.testing.assert_close(torch.autograd.grad(3 * total, x), torch.autograd.grad(3 * expected, x))


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_smoothed_labels_are_those_of_torch(smoothing):
    x, weights = logits(), torch.rand(2, 4)
    total, _ = cross_entropy_sum(x, LABELS, weights, smoothing=smoothing)
    each = functional.cross_entropy(x.flatten(0, 1), LABELS.flatten(), reduction="none", label_smoothing=smoothing)
    expected = (each * weights.flatten()).sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.autograd.grad(3 * total, x), torch.autograd.grad(3 * expected, x))


def test_weights_count_and_ignored_labels_do_not():
    x, weights = logits(), torch.rand(2, 4)
    total, weight = cross_entropy_sum(x, LABELS, weights)
    each = functional.cross_entropy(x.flatten(0, 1), LABELS.flatten(), reduction="none")
    expected = (each * weights.flatten()).sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(weight, weights[LABELS != -100].sum().double())
    torch.testing.assert_close(torch.autograd.grad(total, x), torch.autograd.grad(expected, x))


def test_the_gradient_is_right():
    weights = torch.rand(2, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: cross_entropy_sum(x, LABELS, weights)[0], logits())


def test_low_precision_is_accumulated_in_float32():
    x = torch.randn(1, 512, 11).bfloat16().requires_grad_()
    labels = torch.randint(0, 11, (1, 512))
    total, weight = cross_entropy_sum(x, labels)
    assert total.dtype == weight.dtype == torch.float32
    torch.testing.assert_close(
        total, functional.cross_entropy(x.detach().float().flatten(0, 1), labels.flatten(), reduction="sum")
    )
    total.backward()
    assert x.grad.dtype == torch.bfloat16


def test_nothing_but_ignored_labels_gives_zero():
    x = logits()
    total, weight = cross_entropy_sum(x, torch.full((2, 4), -100))
    total.backward()
    assert total == 0
    assert weight == 0
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_large_logits_do_not_overflow():
    x = torch.tensor([[[1e4, -1e4]]], requires_grad=True)
    total, _ = cross_entropy_sum(x, torch.tensor([[1]]))
    total.backward()
    assert total == 2e4
    assert torch.equal(x.grad, torch.tensor([[[1.0, -1.0]]]))


def test_logits_that_are_not_contiguous():
    x = logits()
    wide = torch.stack((x, x), -1)[..., 0]
    torch.testing.assert_close(cross_entropy_sum(wide, LABELS)[0], cross_entropy_sum(x, LABELS)[0])


def test_no_gradient_is_needed_to_evaluate():
    with torch.no_grad():
        total, _ = cross_entropy_sum(logits(), LABELS)
    assert not total.requires_grad
