"""Trace of what a model of transformers does with tokens, seen by sending shapes through it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from nxdt_plugin_hf.attention import IMPLEMENTATION, AttentionCall, note_calls
from nxdt_plugin_hf.errors import NotACausalLM, UnsupportedArchitecture
from nxdt_plugin_hf.mixtures import replace_experts, routed_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nxdt_plugin_hf.architecture import Architecture


_TOKENS = 4
_OWN_ATTENTION = "it computes attention without transformers' interface for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Calls of modules, by path, in order."""

    attention: Mapping[str, AttentionCall]
    experts: Mapping[str, int]
    """Experts that a token is sent to."""


def trace_model(architecture: Architecture) -> Trace:
    """Send shapes through the model.

    Raises:
        UnsupportedArchitecture: it cannot be built, has experts or buffers that ours cannot stand for, draws random
            numbers, or a layer does not leave its attention to us or wants what no core has.
        NotACausalLM: tokens see later ones.
    """
    model = _built(architecture).train()
    top_k: dict[nn.Module, int] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        top_k[module] = (args[1] if len(args) > 1 else kwargs["top_k_index"]).shape[-1]

    for _, experts in routed_experts(model):
        experts.register_forward_pre_hook(note, with_kwargs=True)
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    calls, draws = note_calls(model), _Draws()
    try:
        with torch.no_grad(), draws.tracker, draws:
            model(input_ids=ids, position_ids=ids, document_ids=ids, use_cache=False)
    except Exception as error:  # a model's own code may raise anything
        reason = f"its forward cannot be followed: {_words(error)}"
        raise UnsupportedArchitecture(model=architecture.name, reason=reason) from error
    if draws.places:
        reason = f"'{pattern_of(draws.places[0])}' draws random numbers in training, which no layout could repeat"
        keys = "where hf_config has keys for such dropout or noise, set them to 0"
        raise UnsupportedArchitecture(model=architecture.name, reason=f"{reason}; {keys}")
    found = {path: calls[module] for path, module in model.named_modules() if module in calls}
    _check(architecture.name, found)
    layers = model.get_submodule(pattern_of(next(iter(found))).partition(".*.")[0])
    if len(found) < len(list(layers.children())):
        reason = f"only {len(found)} of its {len(list(layers.children()))} layers mix tokens by attention"
        raise UnsupportedArchitecture(model=architecture.name, reason=reason)
    _check_mixers(architecture.name, model)
    return Trace(attention=found, experts={path: top_k[experts] for path, experts in routed_experts(model)})


def _built(architecture: Architecture) -> PreTrainedModel:
    """The model on the meta device."""
    try:
        with torch.device("meta"):
            model = architecture.new()
    except Exception as error:  # a model's own code may raise anything
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
            raise UnsupportedArchitecture(model=architecture.name, reason=_OWN_ATTENTION) from error
        reason = f"it cannot be built with this configuration: {_words(error)}"
        raise UnsupportedArchitecture(model=architecture.name, reason=reason) from error
    kept = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    if kept:
        reason = f"its buffer '{kept[0]}' is saved and holds no fractions"
        raise UnsupportedArchitecture(model=architecture.name, reason=reason)
    replace_experts(model)
    for module in model.modules():
        if type(module) is nn.Dropout:  # which is replaced by one whose masks every layout repeats
            module.p = 0.0
    return model


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which modules draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = ModuleTracker()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.places.append(max(self.tracker.parents, key=len).partition(".")[2])
        return func(*args, **(kwargs or {}))


def _check_mixers(name: str, model: nn.Module) -> None:
    """Refuse modules that mix tokens without attention, which would not keep packed documents apart."""
    for path, module in model.named_modules():
        convolves = isinstance(module, nn.Conv1d) and module.kernel_size != (1,)
        if convolves or isinstance(module, nn.RNNBase) or hasattr(module, "A_log"):
            reason = f"'{pattern_of(path)}' mixes tokens without attention, and would mix packed documents"
            raise UnsupportedArchitecture(model=name, reason=reason)


def _words(error: Exception) -> str:
    """Return the error of transformers' code, for people who have not read that code."""
    if isinstance(error, KeyError):
        return f"transformers' code finds no {error.args[0]!r}" if error.args else "transformers' code lacks a key"
    if isinstance(error, AttributeError) and error.name is not None:
        kind = "null" if error.obj is None else f"a {type(error.obj).__name__}"
        return (
            f"transformers' code asks {kind} for {error.name!r}; a key of config.json is missing or of the wrong type"
        )
    return f"transformers' code says: {str(error).partition(chr(10))[0].rstrip('.')}"


def pattern_of(path: str) -> str:
    """``model.layers.3.mlp`` as ``model.layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def is_norm(module: nn.Module) -> bool:
    """Return whether ``module`` normalises; transformers recognises norms by the names of their classes, too."""
    return "Norm" in type(module).__name__ and any(True for _ in module.parameters(recurse=False))


def _check(name: str, calls: Mapping[str, AttentionCall]) -> None:
    if not calls:
        raise UnsupportedArchitecture(model=name, reason=_OWN_ATTENTION)
    places = sorted({pattern_of(path) for path in calls})
    if len(places) > 1 or places[0].count("*") != 1:
        raise UnsupportedArchitecture(model=name, reason=f"it has attention elsewhere than once a layer ({places})")
    for path, call in calls.items():
        if not call.causal:
            raise NotACausalLM(model=name, reason=f"tokens of '{path}' see later ones")
        if not call.documents:
            raise UnsupportedArchitecture(model=name, reason=f"'{path}' does not receive the document boundaries")
        if call.unknown:
            raise UnsupportedArchitecture(model=name, reason=f"'{path}' wants {', '.join(call.unknown)}")
        scaled = call.scale != call.key_width**-0.5
        if call.dropout and (call.window or call.softcap or scaled or call.sinks):
            reason = f"'{path}' wants dropout with a window, a cap, a scale or sinks; set attention_dropout to 0"
            raise UnsupportedArchitecture(model=name, reason=reason)
        if call.softcap and call.sinks:
            reason = f"'{path}' wants sinks with a cap"
            raise UnsupportedArchitecture(model=name, reason=reason)
