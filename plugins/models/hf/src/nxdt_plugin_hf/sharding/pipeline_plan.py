"""Pipeline parallelism by the plan that a model of transformers brings, tried out before it is believed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from nxdt_core.distributed.devices import HOST
from nxdt_core.protocols.plan import PipelinePlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nxdt_plugin_hf.modeling import CausalLM

__all__ = ["pipeline_plan"]

_TOKENS = 4


def pipeline_plan(model: CausalLM, layers: str, hidden_size: int) -> tuple[PipelinePlan | None, str]:
    """Translate ``pp_plan`` of ``model``.

    Args:
        model: whole, on the meta device; not changed.
        layers: path of its layers.
        hidden_size: width of what travels.

    Returns:
        The plan, or None and why there is none.
    """
    theirs = cast("PreTrainedModel", model).pp_plan or {}
    if layers not in theirs:
        return None, "transformers has no pipeline plan for it"
    first, last = [model.embedding_path], [model.head_path]
    modules = dict(model.named_modules())
    for path, (takes, _) in theirs.items():
        if path not in (layers, *first, *last) and path in modules:
            (first if takes[0] in ("input_ids", "inputs_embeds") else last).insert(-1, path)
    plan = PipelinePlan(hidden_size=hidden_size, first=tuple(first), layers=layers, last=tuple(last))
    refusal = _refusal(model, plan)
    return (plan, "") if refusal is None else (None, refusal)


def _refusal(model: CausalLM, plan: PipelinePlan) -> str | None:
    """A stage between others, without its layers, must hand on what it is given: what is left of the model changes
    nothing, and knows nothing of the first stage's or the last's."""
    stage = copy.deepcopy(model)
    stage.get_submodule(plan.layers)._modules.clear()
    for path in (*plan.first, *plan.last):
        stage.set_submodule(path, nn.Identity())
    left = [name for name, _ in stage.named_parameters()]
    if left:
        return f"its plan in transformers puts {', '.join(left)} on no stage"
    stage.to_empty(device=HOST)
    stage.reset_buffers()
    hidden = torch.linspace(-1, 1, _TOKENS * plan.hidden_size).view(1, _TOKENS, plan.hidden_size)
    try:
        with torch.no_grad():
            handed_on = stage.eval()(hidden, torch.arange(_TOKENS)[None])
    except Exception as error:  # a model's own code may raise anything
        return f"a stage without the first layers does not run ({type(error).__name__}: {error})"
    if not isinstance(handed_on, torch.Tensor) or not torch.equal(handed_on, hidden):
        return "its forward changes hidden states outside of its layers, on every stage"
    return None
