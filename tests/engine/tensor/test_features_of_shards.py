"""Values for each channel or head are sharded with the layer that computes these, parameters and buffers alike."""

from __future__ import annotations

import pytest
import torch
from nxdt_testing.ranks import RankPool, process_group
from torch import nn

from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.tensor.apply import apply_tensor_parallel
from nxdt_core.errors.base import NxdtError
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan

WIDTH, CHANNELS = 4, 6
PLAN = ParallelPlan(
    tensor={"block.up": "column", "block.scale": "channels", "block.down": "row"}, tensor_blocks=("block",)
)


class Scale(nn.Module):
    """A trained factor and a fixed offset for each channel."""

    def __init__(self, channels, *, saved=False):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, channels))
        self.register_buffer("offset", torch.empty(channels), persistent=saved)
        self.reset_buffers()

    def reset_buffers(self):
        self.offset.copy_(torch.arange(len(self.offset)) / 10)

    def forward(self, hidden):
        return hidden * self.weight + self.offset


class Block(nn.Module):
    def __init__(self, channels=CHANNELS, *, saved=False):
        super().__init__()
        self.up = nn.Linear(WIDTH, channels, bias=False)
        self.scale = Scale(channels, saved=saved)
        self.down = nn.Linear(channels, WIDTH, bias=False)

    def forward(self, hidden):
        return self.down(torch.tanh(self.scale(self.up(hidden))))


def model(**options):
    torch.manual_seed(0)
    made = nn.Module()
    made.block = Block(**options)
    return made.double()


def output_and_gradient(made):
    hidden = torch.arange(2.0 * 3 * WIDTH, dtype=torch.float64).reshape(2, 3, WIDTH) / 10
    output = made.block(hidden)
    output.square().sum().backward()
    gradient = made.block.scale.weight.grad
    return output.detach(), gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def on_a_rank(channels, saved, reset):
    with process_group():
        made = model(channels=channels, saved=saved)
        mesh = ParallelMesh.build(MeshSizes(tp=2), "cpu")
        try:
            apply_tensor_parallel(made, PLAN, mesh, sequence_parallel=False)
        except NxdtError as error:
            return str(error)
        if reset:
            with torch.no_grad():
                made.block.scale.offset.fill_(float("nan"))
            made.block.scale.reset_buffers()
        return *output_and_gradient(made), made.block.scale.offset.numel()


@pytest.mark.parametrize("reset", [False, True])
def test_a_rank_computes_with_the_values_of_its_own_channels(reset):
    output, gradient = output_and_gradient(model())
    for found, found_gradient, held in RankPool(2, lasting=True).run(on_a_rank, CHANNELS, False, reset):
        torch.testing.assert_close(found, output)
        torch.testing.assert_close(found_gradient, gradient)
        assert held == CHANNELS // 2


def test_a_buffer_that_would_be_saved_in_parts_is_refused():
    for text in RankPool(2, lasting=True).run(on_a_rank, CHANNELS, True, False):
        assert "'block.scale' is channels, and its buffer 'offset' would be saved: register it with" in text


def test_channels_that_do_not_divide_are_refused():
    for text in RankPool(2, lasting=True).run(on_a_rank, 5, False, False):
        assert "has 5 output features, which 2 tensor parallel ranks cannot share" in text
