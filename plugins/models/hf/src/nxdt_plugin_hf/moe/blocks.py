"""The blocks around experts: router, experts and what adds them up, which tensor parallelism ends with one sum.

Experts that are cut give parts of a sum, so a block may do no more than add them up: that is tried out, with numbers in
the place of what the experts give.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from nxdt_core.distributed.devices import HOST
from nxdt_plugin_hf.moe.experts import RoutedExperts, routed_experts

__all__ = ["end_with_sum", "mixtures", "not_additive", "uses_random_numbers"]

_TOKENS = 4


def mixtures(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and module of each block around experts; none where they are in a layer itself.

    Args:
        model: with our experts.
        layers: path of the layers.
    """
    for path, _ in routed_experts(model):
        block = path.rpartition(".")[0]
        if block.startswith(f"{layers}.") and "." in block.removeprefix(f"{layers}."):
            yield block, model.get_submodule(block)


def end_with_sum(block: nn.Module) -> None:
    """Let what ``block`` returns be the sum of what the tensor parallel ranks computed."""

    def summed(module: nn.Module, args: Any, output: Any) -> Any:
        finish = _experts_of(module).dispatcher.finish
        return (finish(output[0]), *output[1:]) if isinstance(output, tuple) else finish(output)

    block.register_forward_hook(summed)


def uses_random_numbers(block: nn.Module, hidden_size: int) -> bool:
    """Return whether routing is random in training."""
    with HOST, torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        _Trial(block, hidden_size)(0.0)
        return not torch.equal(before, torch.get_rng_state())


def not_additive(block: nn.Module, hidden_size: int, ends: Collection[str] = ()) -> bool:
    """Return whether it does more than to add up what its experts give.

    ``ends``: paths in ``block`` of linear layers that give parts of the sum, too.
    """
    with HOST, torch.random.fork_rng(devices=[]):
        trial = _Trial(block, hidden_size, ends)
        nothing, one, two, three = (trial(scale) for scale in (0.0, 1.0, 2.0, 3.0))
    return bool(nothing.any()) or not torch.allclose(one + two, three, rtol=1e-4, atol=1e-5)


class _Trial:
    """Return a copy of a block whose experts return given values."""

    def __init__(self, block: nn.Module, hidden_size: int, ends: Collection[str] = ()) -> None:
        self._block = copy.deepcopy(block).train()
        self._block._forward_hooks.clear()  # :func:`end_with_sum`
        for path, _ in list(routed_experts(self._block)):
            self._block.set_submodule(path, _Given(hidden_size))
        for path in ends:
            self._block.set_submodule(path, _Given(hidden_size))
        self._block.to_empty(device=HOST)
        with torch.no_grad():
            for number, tensor in enumerate((*self._block.parameters(), *self._block.buffers())):
                tensor.fill_(0.01 * (1 + number))
        self._hidden = torch.linspace(-1, 1, _TOKENS * hidden_size).view(1, _TOKENS, hidden_size)

    @torch.no_grad()
    def __call__(self, scale: float) -> torch.Tensor:
        for part in self._block.modules():
            if isinstance(part, _Given):
                part.scale = scale
        output = self._block(self._hidden.clone())
        found: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return found


class _Given(nn.Module):
    """In the place of what gives parts of the sum."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.scale = 0.0

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the numbers that depend on nothing but the scale."""
        shape = (*hidden.shape[:-1], self.hidden_size)
        return self.scale * torch.linspace(-1, 2, math.prod(shape)).view(shape)


def _experts_of(block: nn.Module) -> RoutedExperts:
    return next(experts for _, experts in routed_experts(block))
