"""Numbers that the host reads are read once, also where what reads them is computed again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nxdt_core.engine.recompute import apply_recompute
from nxdt_core.models.host_values import host_values
from nxdt_core.protocols.plan import ParallelPlan


class Reads(nn.Module):
    """Scales by a number of the device, and remembers nothing of it."""

    def __init__(self, number: torch.Tensor) -> None:
        super().__init__()
        self.number = number

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        (factor,) = host_values(self.number)
        return torch.sin(hidden) * factor


class Nested(nn.Module):
    def __init__(self, number: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = Reads(number), Reads(number)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(hidden) + host_values(self.first.number)[0])


PLAN = ParallelPlan(recompute={"Outer": ("0",), "Inner": ("0.first", "0.second")}, recompute_layer="0")


@pytest.mark.parametrize("names", [(), ("Outer",), ("Inner",), ("Outer", "Inner")], ids=str)
def test_backward_computes_with_what_forward_read(names: tuple[str, ...]) -> None:
    """The number changes between forward and backward, as no number of a model does."""

    def gradients(changed: tuple[str, ...]) -> list[torch.Tensor]:
        number = torch.tensor([3])
        model = nn.Sequential(Nested(number))
        apply_recompute(model, PLAN, granularity="selective", names=changed)
        inputs = [torch.linspace(0, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        outputs = []
        for factor, hidden in zip((3, 4), inputs, strict=True):  # two micro-batches are in flight
            number.fill_(factor)
            outputs.append(model(hidden))
        number.fill_(9)
        for output in outputs:
            output.sum().backward(retain_graph=True)
            output.sum().backward()
        return [hidden.grad for hidden in inputs]

    torch.testing.assert_close(gradients(names), gradients(()), rtol=0, atol=0)
