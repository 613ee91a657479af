"""RMSNorm on its two ways: few passes on the CPU, the stock operator elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from nxdt_core.models.norm import RMSNorm


def definition(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


@pytest.fixture
def norm() -> RMSNorm:
    norm = RMSNorm(24, eps=1e-3).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 24))
    return norm


@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 24), (2, 1, 4, 24)])
def test_values_and_gradients_are_those_of_the_definition(norm, shape):
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    x.requires_grad_()
    ours = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    theirs = torch.autograd.grad(definition(x, norm.weight, 1e-3), (x, norm.weight), grad)
    torch.testing.assert_close(norm(x), definition(x, norm.weight, 1e-3))
    torch.testing.assert_close(ours, theirs)


def test_gradients_of_tensors_that_are_not_contiguous(norm):
    x = torch.randn(3, 24, 2, dtype=torch.float64).transpose(1, 2).requires_grad_()
    assert torch.autograd.gradcheck(norm, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_low_precision_are_taken_in_float32(dtype):
    norm = RMSNorm(512).to(dtype)
    x = torch.randn(4, 512).mul_(300).to(dtype)  # its squares overflow float16
    expected = definition(x.float(), torch.ones(512), 1e-5)
    torch.testing.assert_close(norm(x).float(), expected, rtol=1e-2, atol=1e-2)


def test_autocast_inputs_keep_their_precision():
    norm, x = RMSNorm(16), torch.randn(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(norm(x), functional.rms_norm(x, (16,), eps=1e-5))


def test_both_ways_agree():
    class Wrapped(torch.Tensor):
        """As a sharded tensor is: not plainly a Tensor."""

    norm, x = RMSNorm(32), torch.randn(3, 32)
    torch.testing.assert_close(norm(x.as_subclass(Wrapped)).as_subclass(torch.Tensor), norm(x))


def test_a_zero_row_stays_zero_with_a_finite_gradient(norm):
    x = torch.zeros(2, 24, dtype=torch.float64, requires_grad=True)
    norm(x).sum().backward()
    assert torch.equal(norm(x), torch.zeros(2, 24, dtype=torch.float64))
    assert torch.isfinite(x.grad).all()
