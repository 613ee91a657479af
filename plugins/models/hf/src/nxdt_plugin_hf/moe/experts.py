"""Experts of transformers' models as ours: the same numbers from matrices that every layout can share out.

transformers lets any function take the place of its experts' forward (its ``ExpertsInterface``), so that a call with
tokens, the numbers of their experts and weights is all that a model asks of them. Ours keeps gate and up apart: fused
in one matrix, tensor parallel ranks would hold gates without their ups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from nxdt_core.distributed.devices import HOST
from nxdt_core.models.mlp import GatedSiLU
from nxdt_core.models.moe.dispatch import LocalDispatcher
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.router import Routing, TokenShards, WholeMicroBatch
from nxdt_core.models.patterns import matches
from nxdt_plugin_hf.errors import UnsupportedArchitecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DISPATCHER", "STACK", "STACK_SIDES", "TENSOR_STYLE", "RoutedExperts", "replace_experts", "routed_experts"]

STACK = "stack"
"""Attribute of :class:`RoutedExperts` with the matrices."""
STACK_SIDES: Mapping[str, Literal["column", "row"]] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
"""Which side of its matrices tensor parallelism cuts."""
DISPATCHER = "dispatcher"
"""Its attribute that moves tokens to experts and back."""
TENSOR_STYLE = "moe_tp_experts"
"""What plans of transformers call experts that are cut over tensor parallel ranks."""


class RoutedExperts(nn.Module):
    """In the place of a model's experts.

    Under tensor parallelism what it returns is this rank's part of a sum, which ends with the block around it.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.stack = SwiGLUExperts(hidden_size, ffn_hidden_size, experts)
        self.dispatcher = LocalDispatcher()
        self.shards: TokenShards = WholeMicroBatch()

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``hidden_states`` [tokens, hidden] to the same shape; ``top_k_index`` int64 and ``top_k_weights`` [tokens,
        experts per token]."""
        chosen = top_k_index.new_zeros(len(top_k_index), self.experts).scatter_(1, top_k_index, 1)
        routing = Routing(experts=top_k_index, weights=top_k_weights, counts=chosen.sum(0))
        return self.dispatcher.run(hidden_states, routing, self.stack, by=self.dispatcher.mixed)


def routed_experts(model: nn.Module) -> Iterator[tuple[str, RoutedExperts]]:
    """Yield the path and module, in order."""
    for path, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            yield path, module


def replace_experts(model: PreTrainedModel) -> None:
    """Put ours in the place of the experts of ``model``, which may be on the meta device; no values are kept.

    Raises:
        UnsupportedArchitecture: they compute something else, or without transformers' interface for them.
    """
    name = type(model).__name__
    for path, module in list(model.named_modules()):
        if hasattr(type(module), "_apply_gate"):  # what transformers' decorator for experts leaves behind
            model.set_submodule(path, _ours(name, path, module))
    ours = {path for path, _ in routed_experts(model)}
    paths = [path for path, _ in (*model.named_modules(), *model.named_parameters())]
    sharded = (pattern for pattern, style in (model.tp_plan or {}).items() if style == TENSOR_STYLE)
    for pattern in (*_expert_patterns(model), *sharded):
        others = [path for path in paths if matches(pattern, path) and path not in ours]
        if others:
            reason = f"'{others[0]}' are experts that do not go through transformers' interface for them"
            raise UnsupportedArchitecture(model=name, reason=reason)


def _expert_patterns(model: PreTrainedModel) -> list[str]:
    """Patterns of transformers' plan for expert parallelism. In 5.17 it is private and names routers as well."""
    plan = model.ep_plan if hasattr(model, "ep_plan") else model._ep_plan
    return [pattern for pattern, style in (plan or {}).items() if style != "ep_router"]


def _ours(model: str, path: str, theirs: nn.Module) -> RoutedExperts:
    problem = _problem(theirs)
    if problem:
        raise UnsupportedArchitecture(model=model, reason=f"its experts '{path}' {problem}")
    gate_up: Any = theirs.gate_up_proj
    experts, twice_wide, hidden_size = gate_up.shape
    with gate_up.device:
        return RoutedExperts(hidden_size, twice_wide // 2, experts)


def _problem(theirs: Any) -> str | None:
    """What our experts would lose."""
    shapes = {name: parameter.ndim for name, parameter in theirs.named_parameters()}
    if theirs.is_transposed or not theirs.is_concatenated or shapes != {"gate_up_proj": 3, "down_proj": 3}:
        return f"are not the two stacks of matrices gate_up_proj and down_proj ({', '.join(shapes)})"
    with HOST, torch.no_grad():
        rows = torch.linspace(-9, 9, 64).view(4, 16)
        expected = GatedSiLU()(*rows.chunk(2, dim=-1))
        try:
            found = cast(torch.Tensor, theirs._apply_gate(rows))
        except Exception as error:  # a model's own code may raise anything
            return f"have a gate that cannot be tried ({type(error).__name__})"
    if found.shape != expected.shape or not torch.allclose(found, expected, atol=1e-6):
        return "have another gate than silu(gate) * up"
    return None
