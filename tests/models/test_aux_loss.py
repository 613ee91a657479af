"""Auxiliary losses join the gradient and leave the values alone."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nxdt_core.models.moe.layer import add_aux_loss
from nxdt_core.models.step_boundary import at_step_boundary
from nxdt_core.protocols.step_context import StepContext


def gradient(scale: float | None, through=add_aux_loss) -> torch.Tensor:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    hidden = weight * 5
    aux = (weight**2).sum()
    if scale is None:
        output = through(hidden, aux)
    else:
        with at_step_boundary(StepContext(aux_loss_scale=scale)):
            output = through(hidden, aux)
    assert torch.equal(output, hidden)
    output.sum().backward()
    return weight.grad


def test_the_gradient_of_both_losses_arrives():
    assert gradient(None).tolist() == [5 + 4, 5 + 6]


def test_the_scale_of_forward_applies_though_backward_runs_outside():
    assert gradient(0.5).tolist() == [5 + 2, 5 + 3]


def test_the_scale_may_be_a_tensor_and_ends_with_the_block():
    assert gradient(torch.tensor(0.5)).tolist() == [5 + 2, 5 + 3]
    assert gradient(None).tolist() == [5 + 4, 5 + 6]


def test_recomputation_counts_the_loss_once_and_with_its_scale():
    def through(hidden, aux):
        return checkpoint(add_aux_loss, hidden, aux, use_reentrant=False)

    assert gradient(0.5, through).tolist() == [5 + 2, 5 + 3]


def test_an_auxiliary_loss_that_is_no_scalar_is_refused():
    with pytest.raises(ValueError, match="scalar"):
        add_aux_loss(torch.zeros(2), torch.zeros(2))
