"""Mixtures of experts of transformers: their blocks, their experts as ours, and their auxiliary loss.

A block is a router, experts and their sum, which tensor parallelism ends. Sharded experts give parts of a sum, so the
block may only add them up. This is tried out, with numbers in place of the experts' outputs.

transformers lets any function replace its experts' forward (``ExpertsInterface``): a call with tokens, the numbers of
their experts and weights. Ours keeps gate and up apart: in one fused matrix, tensor parallel ranks would hold gates
without their ups.

The auxiliary loss is that of ``output_router_logits``, by the model's own function. It multiplies the assignments of
all layers with the probabilities of all layers, so it needs them on one process, with all tokens of the micro-batch.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from nxdt_core.distributed.devices import HOST
from nxdt_core.models.mlp import GatedSiLU
from nxdt_core.models.moe.dispatch import LocalDispatcher
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.layer import add_aux_loss
from nxdt_core.models.moe.router import Routing, TokenShards, WholeMicroBatch
from nxdt_core.models.patterns import matches
from nxdt_core.models.step_boundary import step_of
from nxdt_plugin_hf.architecture import Architecture
from nxdt_plugin_hf.errors import UnsupportedArchitecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_TOKENS = 4


STACK = "stack"
"""Attribute of :class:`RoutedExperts` with the matrices."""
STACK_SIDES: Mapping[str, Literal["column", "row"]] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
"""Sides on which tensor parallelism shards the matrices; their biases end in :data:`BIAS`."""
BIAS = "_bias"
"""End of the names of biases of experts, there and here."""
DISPATCHER = "dispatcher"
"""Attribute of :class:`RoutedExperts` that moves tokens to experts and back."""
TENSOR_STYLE = "moe_tp_experts"
"""Style of experts that are sharded over tensor parallel ranks, in plans of transformers."""
_MATRICES = {"gate_up_proj": 3, "down_proj": 3}
_BIASES = {f"{name}{BIAS}": 2 for name in _MATRICES}
"""Biases that experts of transformers may have, and their dimensions."""
REFUSED = "its routers' auxiliary loss needs {what}; set model.hf_config.output_router_logits=false to train without"
"""Reason against a layout."""


def mixtures(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and module of each block around our experts; none where they are in one of ``layers`` itself."""
    for path, _ in routed_experts(model):
        block = path.rpartition(".")[0]
        if block.startswith(f"{layers}.") and "." in block.removeprefix(f"{layers}."):
            yield block, model.get_submodule(block)


def end_with_sum(block: nn.Module, args: Any, output: Any) -> Any:
    """Return the sum of what the tensor parallel ranks computed as ``output`` of ``block``: a forward hook."""
    finish = next(experts for _, experts in routed_experts(block)).dispatcher.finish
    return (finish(output[0]), *output[1:]) if isinstance(output, tuple) else finish(output)


def not_additive(block: nn.Module, hidden_size: int, ends: Collection[str] = ()) -> bool:
    """Return whether it does more than to add up what its experts give.

    ``ends``: paths in ``block`` of linear layers that give parts of the sum, too.
    """
    with HOST, torch.random.fork_rng(devices=[]), torch.no_grad():
        trial = copy.deepcopy(block).train()
        trial._forward_hooks.clear()  # :func:`end_with_sum`
        parts = {path: _Given(hidden_size) for path in (*(path for path, _ in routed_experts(trial)), *ends)}
        for path, part in parts.items():
            trial.set_submodule(path, part)
        trial.to_empty(device=HOST)
        for number, tensor in enumerate((*trial.parameters(), *trial.buffers())):
            tensor.fill_(0.01 * (1 + number))
        hidden, outputs = torch.linspace(-1, 1, _TOKENS * hidden_size).view(1, _TOKENS, hidden_size), []
        for scale in (0.0, 1.0, 2.0, 3.0):
            for part in parts.values():
                part.scale = scale
            output = trial(hidden.clone())
            outputs.append(output[0] if isinstance(output, tuple) else output)
    nothing, one, two, three = outputs
    return bool(nothing.any()) or not torch.allclose(one + two, three, rtol=1e-4, atol=1e-5)


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


class RoutedExperts(nn.Module):
    """In the place of a model's experts.

    Under tensor parallelism what it returns is this rank's part of a sum, which ends with the block around it.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, experts: int, *, bias: bool) -> None:
        super().__init__()
        self.experts = experts
        self.stack = SwiGLUExperts(hidden_size, ffn_hidden_size, experts, bias=bias)
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
            theirs: Any = module
            if problem := _problem(theirs):
                raise UnsupportedArchitecture(model=name, reason=f"its experts '{path}' {problem}")
            gate_up = theirs.gate_up_proj
            experts, twice_wide, hidden_size = gate_up.mT.shape if theirs.is_transposed else gate_up.shape
            with gate_up.device:
                bias = hasattr(theirs, f"gate_up_proj{BIAS}")
                routed = RoutedExperts(hidden_size, twice_wide // 2, experts, bias=bias)
            if not torch.allclose(_Gate(theirs)(*_tried()), GatedSiLU()(*_tried()), atol=1e-6):
                routed.stack.activation = _Gate(theirs)
            model.set_submodule(path, routed)
    ours = {path for path, _ in routed_experts(model)}
    paths = [path for path, _ in (*model.named_modules(), *model.named_parameters())]
    sharded = (pattern for pattern, style in (model.tp_plan or {}).items() if style == TENSOR_STYLE)
    # Those of transformers' plan for expert parallelism. In 5.17 it is private and names routers as well.
    plan = model.ep_plan if hasattr(model, "ep_plan") else model._ep_plan
    for pattern in (*(pattern for pattern, style in (plan or {}).items() if style != "ep_router"), *sharded):
        others = [path for path in paths if matches(pattern, path) and path not in ours]
        if others:
            reason = f"'{others[0]}' are experts that do not go through transformers' interface for them"
            raise UnsupportedArchitecture(model=name, reason=reason)


def _problem(theirs: Any) -> str | None:
    """Return what our experts would lose; None if nothing."""
    shapes = {name: parameter.ndim for name, parameter in theirs.named_parameters()}
    normed = getattr(theirs, "has_post_expert_norm", False)  # not in 5.17
    if normed or shapes not in (_MATRICES, {**_MATRICES, **_BIASES}):
        return f"are not the two stacks of matrices gate_up_proj and down_proj ({', '.join(shapes)})"
    tried = _tried()
    try:
        whole, part = (_Gate(theirs)(*(tensor[:, :features] for tensor in tried)) for features in (8, 3))
    except Exception as error:  # a model's own code may raise anything
        return f"have a gate that cannot be tried ({type(error).__name__})"
    if whole.shape != tried[0].shape or not torch.allclose(whole[:, :3], part, atol=1e-6):
        return "have a gate that mixes features, of which tensor parallel ranks have parts"
    return None


def _tried() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a gate and an up, [4, 8]."""
    gate, up = torch.linspace(-9, 9, 64, device=HOST).view(4, 16).chunk(2, dim=-1)
    return gate, up


class _Adjacent(torch.autograd.Function):
    """The identity, with a gradient in one piece of memory: grouped products reject every other element of a row."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.contiguous()


class _Gate(nn.Module):
    """The function of gate and up of a model's experts, as it is there: of both in one matrix."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        bare = copy.copy(theirs)
        bare._parameters = {}
        self._theirs = (bare,)  # in a tuple: a submodule would be part of the model

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return [rows, features]; both are of that shape."""
        (theirs,) = self._theirs
        if theirs.is_concatenated:
            joined = torch.cat((gate, up), -1)
        else:
            joined = torch.stack([_Adjacent.apply(part) for part in (gate, up)], -1).flatten(-2)  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, theirs._apply_gate(joined))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBalance:
    """The loss of a model, as a pair of hooks on what computes its hidden states."""

    loss: Callable[..., torch.Tensor]
    """``(router_logits, experts, top_k, attention_mask=…) -> scalar``, of the model's module."""
    experts: int
    top_k: int
    coefficient: float

    def ask(self, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Let transformers keep, before forward, the routers' logits."""
        return args, {**kwargs, "output_router_logits": torch.is_grad_enabled()}

    def join(self, base: nn.Module, args: Any, output: Any) -> Any:
        """Let, after forward, backward through the hidden states also follow the loss.

        transformers adds a mean over tokens to a mean; ours are sums (:mod:`nxdt_core.models.moe.layer`).
        """
        if output.get("router_logits") is None:
            return output
        hidden, logits, padding = output.last_hidden_state, output.router_logits, step_of(None).padding
        copies = next(experts for _, experts in routed_experts(base)).shards.copies
        tokens: int | torch.Tensor = logits[0].shape[0]
        mask = None
        if padding is not None:
            tokens = (~padding).sum()
            mask = (~padding | (tokens == 0)).long()  # a mean over no token would be NaN
        loss = self.loss(logits, self.experts, self.top_k, attention_mask=mask)
        output.last_hidden_state = add_aux_loss(hidden, self.coefficient * tokens / copies * loss)
        return output


def router_balance(architecture: Architecture, model: Any) -> RouterBalance | None:
    """Return the auxiliary loss that transformers would add for ``model``; None where it adds none."""
    loss = getattr(sys.modules[architecture.model_class.__module__], "load_balancing_loss_func", None)
    coefficient = getattr(model, "router_aux_loss_coef", 0.0)
    if loss is None or not coefficient or not getattr(architecture.config, "output_router_logits", False):
        return None
    return RouterBalance(
        loss=loss, experts=model.num_experts, top_k=model.num_experts_per_tok, coefficient=float(coefficient)
    )
