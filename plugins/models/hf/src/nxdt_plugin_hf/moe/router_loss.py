"""The auxiliary loss that transformers adds for routers where ``output_router_logits`` is set, in our gradient.

Its formula is the model's own function. It multiplies the assignments of all layers with the probabilities of all
layers, so it needs them on one process, with all tokens of the micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nxdt_core.models.moe.layer import add_aux_loss
from nxdt_plugin_hf.architecture import Architecture
from nxdt_plugin_hf.moe.experts import routed_experts

__all__ = ["REFUSED", "RouterBalance", "router_balance"]

REFUSED = "its routers' auxiliary loss needs {what}; set model.hf_config.output_router_logits=false to train without"
"""Reason against a layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBalance:
    """The loss of a model, as a pair of hooks on what computes its hidden states."""

    loss: Callable[..., torch.Tensor]
    """``(router_logits, experts, top_k) -> scalar``, of the model's module."""
    experts: int
    top_k: int
    coefficient: float

    def ask(self, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before forward: let transformers keep the routers' logits."""
        return args, {**kwargs, "output_router_logits": torch.is_grad_enabled()}

    def join(self, base: nn.Module, args: Any, output: Any) -> Any:
        """After forward: let backward through the hidden states also follow the loss.

        transformers adds a mean over tokens to a mean; ours are sums (:mod:`nxdt_core.models.moe.layer`).
        """
        if output.get("router_logits") is None:
            return output
        hidden = output.last_hidden_state
        copies = next(experts for _, experts in routed_experts(base)).shards.copies
        weight = self.coefficient * output.router_logits[0].shape[0] / copies
        output.last_hidden_state = add_aux_loss(
            hidden, weight * self.loss(output.router_logits, self.experts, self.top_k)
        )
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
