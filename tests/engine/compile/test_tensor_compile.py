"""torch.compile traces a tensor parallel layer whole: its hooks, local parts of DTensors and collectives."""

import pytest
import torch
from nxdt_testing.ranks import process_group
from torch import nn

from nxdt_core.distributed.placement import local_of
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.tensor.apply import apply_tensor_parallel
from nxdt_core.protocols.mesh import MeshSizes
from tests.engine.tensor.cases import Case, built, materialised
from tests.engine.tensor.models import HIDDEN, SEQ


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


def largest_difference() -> float:
    """Between the compiled layer's output and gradients and its own before."""
    with process_group():
        module, plan = built(Case())
        mesh = ParallelMesh.build(MeshSizes(tp=2), "cpu")
        apply_tensor_parallel(module, plan, mesh, sequence_parallel=True)
        materialised(module, plan, {})
        layer = module.layers["0"]
        hidden = torch.randn(2, SEQ // 2, HIDDEN, dtype=torch.float64)
        rotary = module.rotary(torch.arange(SEQ))
        before = step(layer, hidden, rotary)
        layer.compile(backend="aot_eager", fullgraph=True)
        after = step(layer, hidden, rotary)
        return max((a - b).abs().max().item() for a, b in zip(before, after, strict=True))


def step(layer: nn.Module, hidden: torch.Tensor, rotary) -> list[torch.Tensor]:
    layer.zero_grad()
    output = layer(hidden, rotary)
    output.square().mean().backward()
    return [output.detach(), *(local_of(parameter.grad) for parameter in layer.parameters())]


@pytest.mark.slow
def test_compiled_layer_computes_the_same(ranks) -> None:
    assert max(ranks(2).run(largest_difference, timeout_s=120)) < 1e-12
