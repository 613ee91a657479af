"""The step context arrives as an argument, or at the border where a signature has no room for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nxdt_core.engine.recompute import apply_recompute
from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.decoder import RotaryDecoderLayer
from nxdt_core.models.decoder_config import RotaryDecoderConfig
from nxdt_core.models.step_boundary import accept_step, at_step_boundary, called_with_step, step_of, takes_step
from nxdt_core.models.updates import Update, UpdatedLinear
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.step_context import StepContext

STEP, OTHER = StepContext(aux_loss_scale=0.5), StepContext(aux_loss_scale=0.25)
OUTSIDE = step_of(None)


class Native(nn.Module):
    """Passes its argument on, and notes what it sees."""

    def forward(self, hidden, step=None):
        self.argument, self.border = step, step_of(None)
        return hidden


class Foreign(nn.Module):
    def forward(self, hidden):
        self.border = step_of(None)
        return hidden


class Plain(Update):
    def forward(self, inputs, product, weight):
        self.border = step_of(None)
        return product


class Adapted(Native):
    def __init__(self):
        super().__init__()
        self.linear = UpdatedLinear(nn.Linear(2, 2), Plain())

    def forward(self, hidden, step=None):
        return self.linear(super().forward(hidden, step))


def test_a_forward_with_the_parameter_gets_it_as_an_argument_alone():
    module = Native()
    accept_step(module)
    assert type(module) is Native
    module(torch.zeros(2), step=STEP)
    assert (module.argument, module.border) == (STEP, OUTSIDE)


def test_a_forward_without_the_parameter_finds_it_at_the_border_while_it_runs():
    module = Foreign()
    accept_step(module)
    module(torch.zeros(2), step=STEP)
    assert module.border is STEP
    assert step_of(None) is OUTSIDE


def test_updates_of_adapters_find_it_at_the_border_of_a_model_that_takes_it():
    module = Adapted()
    accept_step(module)
    module(torch.zeros(2), step=STEP)
    assert module.argument is module.linear.update.border is STEP


def test_the_border_ends_with_an_exception():
    with pytest.raises(KeyError), at_step_boundary(STEP):
        raise KeyError
    assert step_of(None) is OUTSIDE


def test_an_argument_precedes_the_border():
    with at_step_boundary(OTHER):
        assert step_of(STEP) is STEP
        assert step_of(None) is OTHER


Context = StepContext


def test_a_parameter_of_that_name_is_it_whatever_its_annotation_is():
    def aliased(logits, batch, step: Context): ...

    def untyped(logits, batch, step=None): ...

    def without(logits, batch): ...

    found = [takes_step(each) for each in (aliased, untyped, without, Native(), Foreign())]
    assert found == [True, True, False, True, False]


def test_a_part_of_a_feed_forward_block_finds_it_where_the_block_does_not_take_it():
    config = RotaryDecoderConfig(num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=8, vocab_size=8)
    part = Native()
    layer = RotaryDecoderLayer(config, DocumentMasks(), nn.Sequential(part))
    layer(torch.zeros(1, 3, 8), (torch.ones(1, 3, 1, 2), torch.ones(1, 3, 1, 2)), step=STEP)
    assert (part.argument, part.border) == (None, STEP)


def test_an_objective_gets_it_either_way():
    assert called_with_step(lambda logits, batch, step: step, STEP, 1, 2) is STEP
    assert called_with_step(lambda logits, batch: step_of(None), STEP, 1, 2) is STEP


class Layer(nn.Module):
    """Keeps a product with a factor of the border, which backward reads."""

    def forward(self, hidden):
        return hidden * (hidden * step_of(None).aux_loss_scale)


def test_what_is_recomputed_sees_the_border_of_its_forward():
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": Layer()})})
    apply_recompute(model, ParallelPlan(recompute_layer="layers.*"), granularity="full")
    hidden = torch.tensor([2.0, 3.0], requires_grad=True)
    with at_step_boundary(STEP):
        output = model["layers"]["0"](hidden)
    with at_step_boundary(OTHER):  # of the next micro-batch of a pipeline
        output.sum().backward()
    assert hidden.grad.tolist() == [2.0, 3.0]
