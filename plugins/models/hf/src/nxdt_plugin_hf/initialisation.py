"""How fresh weights of a model of transformers are drawn: what its own initialisation does, tried on small copies."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from nxdt_core.distributed.devices import HOST
from nxdt_core.protocols.plan import InitRule
from nxdt_plugin_hf.sharding.tracing import is_norm, pattern_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nxdt_plugin_hf.modeling import CausalLM

__all__ = ["init_rules"]

_STD = 0.02
"""Of transformers, where a configuration names none."""


def init_rules(model: CausalLM) -> tuple[InitRule, ...]:
    """Return one rule a kind of parameter.

    Matrices are normal with the configuration's ``initializer_range``, as in the initialisation that transformers'
    models inherit. What vectors begin with, and matrices that are not trained, is seen on a copy of the module that has
    them; those that are not filled with one number have no rule, so that they can come from a checkpoint alone.
    (transformers also sets the padding token's row to zero; here it is drawn.)
    """
    std = getattr(cast("PreTrainedModel", model).config, "initializer_range", None) or _STD
    rules: dict[str, InitRule] = {}
    for path, module in model.named_modules():
        own = [(name, pattern_of(f"{path}.{name}"), p) for name, p in module.named_parameters(recurse=False)]
        if all(pattern in rules for _, pattern, _ in own):
            continue
        constants = _constants(model, module) if any(not _random_rules(module, p) for _, _, p in own) else {}
        for name, pattern, parameter in own:
            if _random_rules(module, parameter):
                rules[pattern] = InitRule(pattern=pattern, distribution="normal", std=std)
            elif name in constants:
                rules[pattern] = InitRule(pattern=pattern, distribution="constant", mean=constants[name])
    return tuple(rules.values())


def _random_rules(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether ``parameter`` of ``module`` begins as random numbers; norms of single heads are matrices and do not."""
    return parameter.ndim >= 2 and parameter.requires_grad and not is_norm(module)


@torch.no_grad()
def _constants(model: CausalLM, module: nn.Module) -> dict[str, float]:
    """Parameters of ``module`` that its initialisation fills with one number."""
    if isinstance(module, nn.Linear):  # its matrix may be large; transformers' own rule for all
        return {"bias": 0.0}
    alone = copy.deepcopy(module).to_empty(device=HOST)
    for parameter in alone.parameters(recurse=False):
        parameter.fill_(float("nan"))
    cast("PreTrainedModel", model)._init_weights(alone)
    filled = {
        name: p for name, p in alone.named_parameters(recurse=False) if not _random_rules(module, p) and p.numel()
    }
    return {name: float(p.flatten()[0]) for name, p in filled.items() if bool((p == p.flatten()[0]).all())}
