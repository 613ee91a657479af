"""The caller's module as a model that engines lay out."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nxdt_plugin_nxd_core.errors import ModelFnReturnsNoModule
from nxdt_plugin_nxd_core.module.calls import Call, loss_in
from nxdt_plugin_nxd_core.module.stages import forward_of_stage, numbered_layers
from torch import nn

from nxdt_core.protocols.plan import InitRule, ParallelPlan

__all__ = ["ModuleBuilder"]


class ModuleBuilder:
    """A :class:`nxdt_core.protocols.model.ModelBuilder` of a module that exists.

    The component's section gives nothing to build: the module and its plan come from
    :func:`nxdt_plugin_nxd_core.initialize_parallel_model`.
    """

    vocab_size = 0
    max_sequence_length: int | None = None

    def __init__(
        self, config: Any, module: nn.Module | None = None, plan: ParallelPlan | None = None, where: Any = None
    ) -> None:
        if module is None or plan is None:
            raise ModelFnReturnsNoModule(found="nothing, since only a program that calls it has one")
        self.module = module
        self._plan = plan
        self._where = where

    def build(self) -> nn.Module:
        """Return a copy of the module without memory, whose forward takes a :class:`Call`."""
        made = _copy_on_meta(self.module)
        if self._plan.pipeline is not None:
            numbered_layers(made, self._plan.pipeline)
        made.__class__ = _called(type(made), self._plan, self._where, dict(self.module.named_buffers()))
        return made

    def plan(self) -> ParallelPlan:
        """Return the plan that the module's layers make."""
        return self._plan

    def init_rules(self) -> Sequence[InitRule]:
        """Return nothing: first values are those that the caller's module has."""
        return ()

    def flops_per_token(self, sequence_length: int) -> float:
        """Return an estimate from the number of parameters."""
        return 6.0 * sum(parameter.numel() for parameter in self.module.parameters())


def _copy_on_meta(module: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


@functools.cache
def _cached(kind: Any) -> Any:
    class Called(kind):  # type: ignore[misc]
        nxd_plan: ParallelPlan
        nxd_loss: Any
        nxd_buffers: Mapping[str, torch.Tensor]

        @torch.no_grad()
        def reset_buffers(self) -> None:
            """Copy the buffers that no checkpoint holds, such as rotary tables, from the caller's module."""
            for name, buffer in self.named_buffers():
                if name in self.nxd_buffers and self.nxd_buffers[name].shape == buffer.shape:
                    buffer.copy_(self.nxd_buffers[name])

        def forward(self, received: torch.Tensor, *, call: Call) -> Any:
            """Run the caller's forward; ``received`` are the hidden states of the stage before."""
            pipeline = self.nxd_plan.pipeline
            if pipeline is None:
                return super().forward(*call.args, **call.kwargs)
            output, is_last = forward_of_stage(self, pipeline, super().forward, received, call)
            return loss_in(output, self.nxd_loss) if is_last else output

    Called.__name__, Called.__qualname__ = kind.__name__, kind.__qualname__
    return Called


def _called(kind: Any, plan: ParallelPlan, where: Any, buffers: Mapping[str, torch.Tensor]) -> type[nn.Module]:
    """``kind`` with a forward that takes a call; in a pipeline the last stage gives the loss."""
    return type(kind.__name__, (_cached(kind),), {"nxd_plan": plan, "nxd_loss": where, "nxd_buffers": buffers})
