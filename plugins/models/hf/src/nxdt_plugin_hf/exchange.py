"""What a directory of transformers calls each parameter: its own conversion, tried on tensors of a few numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from nxdt_core.distributed.devices import HOST
from nxdt_core.errors.base import NxdtError
from nxdt_core.protocols.model import KeyMap
from nxdt_plugin_hf.architecture import Architecture
from nxdt_plugin_hf.errors import DirectoryFormUnknown
from nxdt_plugin_hf.moe.experts import STACK
from nxdt_plugin_hf.sharding.tracing import pattern_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["key_map"]

_EXPERTS = 2


def key_map(architecture: Architecture, parameters: Mapping[str, str | None]) -> tuple[KeyMap, ...]:
    """Return one entry per kind of parameter.

    Args:
        architecture: of the model.
        parameters: name of each → path of the experts that it belongs to.

    Raises:
        DirectoryFormUnknown: the directory has some in another form.
    """
    with torch.device("meta"):
        model = architecture.plain()
    entries: dict[str, KeyMap] = {}
    for name, experts in parameters.items():
        pattern = pattern_of(name)
        if pattern not in entries:
            names = _written(model, name) if experts is None else _written_experts(model, name, experts)
            entries[pattern] = KeyMap(name=pattern, hf_names=(names,), transform="none" if experts is None else "stack")
    return tuple(entries.values())


def _written(model: PreTrainedModel, name: str) -> str:
    found = list(_reverted(model, name, torch.zeros(1, device=HOST)))
    if len(found) != 1:
        raise _other_form(model, name)
    return pattern_of(found[0][0])


def _written_experts(model: PreTrainedModel, name: str, experts: str) -> str:
    """Return the expression that takes one of our stacks out of the matrix that holds it in transformers."""
    kind = name.removeprefix(f"{experts}.{STACK}.")
    rows = {"gate_proj": (0, 2), "up_proj": (1, 2), "down_proj": (0, 1)}[kind]
    fused = f"{experts}.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"
    values = torch.arange(_EXPERTS * rows[1], dtype=torch.float32, device=HOST).view(_EXPERTS, rows[1], 1)
    written = {int(tensor): path for path, tensor in _reverted(model, fused, values) if tensor.shape == (1, 1)}
    mine = [written.get(int(value)) for value in values[:, rows[0], 0]]
    patterns = {pattern_of(path) for path in mine if path is not None}
    numbered = all(path is not None and f".{number}." in path for number, path in enumerate(mine))
    if len(patterns) != 1 or not numbered:
        raise _other_form(model, fused)
    return patterns.pop()


def _reverted(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What transformers would write where a parameter is ``tensor``."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        yield from revert_weight_conversion(model, {name: tensor}).items()
    except Exception as error:  # a conversion may raise anything where another shape is expected
        raise _other_form(model, name) from error


def _other_form(model: PreTrainedModel, name: str) -> NxdtError:
    return DirectoryFormUnknown(model=type(model).__name__, parameter=name)
