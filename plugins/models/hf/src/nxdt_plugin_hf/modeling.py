"""The module: transformers' own class, under its own names, called as this project calls models.

Buffers that are saved like weights, such as the correction of DeepSeek-V3's routers (arXiv:2412.19437), become frozen
parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from nxdt_core.distributed.devices import meta_device
from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.attention.grouped_query import AttentionSemantics, attention_core
from nxdt_core.models.attention.sinks import SinkAttention
from nxdt_core.models.random.dropout import CausalAttentionWithDropout, Dropout
from nxdt_plugin_hf.architecture import CORE, IMPLEMENTATION, NOTED, Architecture, AttentionCall, HeadValues
from nxdt_plugin_hf.errors import NotACausalLM, UnsupportedArchitecture
from nxdt_plugin_hf.mixtures import end_with_sum, mixtures, replace_experts, routed_experts, router_balance

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_TOKENS = 4
_OWN_ATTENTION = "it computes attention without transformers' interface for it"


def trace_model(architecture: Architecture) -> tuple[dict[str, AttentionCall], dict[str, int]]:
    """Send shapes through the model.

    Returns:
        By path, in order, the call of each attention module, and of each module of experts how many a token is sent to.

    Raises:
        UnsupportedArchitecture: it cannot be built, has experts or buffers that ours cannot stand for, draws random
            numbers, or a layer does not leave its attention to us or wants what no core has.
        NotACausalLM: tokens see later ones.
    """
    name = architecture.name
    refused = functools.partial(UnsupportedArchitecture, model=name)
    try:
        with meta_device():
            model = architecture.new().train()
    except Exception as error:  # a model's own code may raise anything
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
            raise refused(reason=_OWN_ATTENTION) from error
        raise refused(reason=f"it cannot be built with this configuration: {_words(error)}") from error
    persistent = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    if persistent:
        raise refused(reason=f"its buffer '{persistent[0]}' is saved and holds no fractions")
    replace_experts(model)
    for module in model.modules():
        if type(module) is nn.Dropout:  # which is replaced by one whose masks every layout repeats
            module.p = 0.0
    top_k: dict[nn.Module, int] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        top_k[module] = (args[1] if len(args) > 1 else kwargs["top_k_index"]).shape[-1]

    for _, experts in routed_experts(model):
        experts.register_forward_pre_hook(note, with_kwargs=True)
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    calls_of, draws = dict[nn.Module, AttentionCall](), _Draws()
    for module in model.modules():
        setattr(module, NOTED, calls_of)
    try:
        with torch.no_grad(), draws.tracker, draws:
            called = model.base_model if architecture.scores else model  # a classifier looks at its tokens' values
            called(input_ids=ids, position_ids=ids, document_ids=ids, use_cache=False)
    except Exception as error:  # a model's own code may raise anything
        raise refused(reason=f"its forward cannot be followed: {_words(error)}") from error
    if draws.places:
        reason = f"'{pattern_of(draws.places[0])}' draws random numbers in training, which no layout could repeat"
        raise refused(reason=f"{reason}; where hf_config has keys for such dropout or noise, set them to 0")
    calls = {path: calls_of[module] for path, module in model.named_modules() if module in calls_of}
    if not calls:
        raise refused(reason=_OWN_ATTENTION)
    places = sorted({pattern_of(path) for path in calls})
    if len(places) > 1 or places[0].count("*") != 1:
        raise refused(reason=f"it has attention elsewhere than once a layer ({places})")
    for path, call in calls.items():
        if not call.causal:
            raise NotACausalLM(model=name, reason=f"tokens of '{path}' see later ones")
        if not call.documents:
            raise refused(reason=f"'{path}' does not receive the document boundaries")
        if call.unknown:
            raise refused(reason=f"'{path}' wants {', '.join(call.unknown)}")
        scaled = call.scale != call.key_width**-0.5
        if call.dropout and (call.window or call.softcap or scaled or call.sinks):
            reason = f"'{path}' wants dropout with a window, a cap, a scale or sinks; set attention_dropout to 0"
            raise refused(reason=reason)
        if call.softcap and call.sinks:
            raise refused(reason=f"'{path}' wants sinks with a cap")
    layers = len(list(model.get_submodule(places[0].partition(".*.")[0]).children()))
    if len(calls) < layers:
        raise refused(reason=f"only {len(calls)} of its {layers} layers mix tokens by attention")
    for path, module in model.named_modules():  # which would not keep packed documents apart
        convolves = isinstance(module, nn.Conv1d) and module.kernel_size != (1,)
        if convolves or isinstance(module, nn.RNNBase) or hasattr(module, "A_log"):
            reason = f"'{pattern_of(path)}' mixes tokens without attention, and would mix packed documents"
            raise refused(reason=reason)
    return calls, {path: top_k[experts] for path, experts in routed_experts(model)}


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
    """Return ``model.layers.*.mlp`` of ``model.layers.3.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def is_norm(module: nn.Module) -> bool:
    """Return whether ``module`` normalises; transformers recognises norms by the names of their classes, too."""
    return "Norm" in type(module).__name__ and any(True for _ in module.parameters(recurse=False))


class CausalLM(nn.Module):
    """Attributes that :func:`build_model` adds to a module, whose class is transformers' own; the two methods become
    attributes as well.

    A pipeline stage is this module with layers taken out of their :class:`NumberedLayers` and ``torch.nn.Identity`` in
    place of modules on other stages; its first argument is then the hidden states.
    """

    embedding_path: str
    head_path: str
    embedding_scale: float | None = None
    """Factor of embeddings."""
    scores: bool = False
    """True if the head gives a score per token."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits [batch, seq, vocab], or scores [batch, seq, 1], of ``input_ids`` int64 [batch, seq].

        Args:
            input_ids: tokens.
            position_ids: int64 [batch, seq]; None for 0, 1, 2, …
            document_ids: int64 [batch, seq]; tokens attend within their own document only. None: one document a row.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        embedding = self.get_submodule(self.embedding_path)
        hidden: torch.Tensor = embedding(input_ids)  # [batch, seq, hidden]
        if self.embedding_scale is not None and not isinstance(embedding, nn.Identity):
            # Rounded to the dtype first, as transformers does.
            hidden = hidden * hidden.new_full((), self.embedding_scale)
        inputs = {"inputs_embeds": hidden, "position_ids": position_ids, "document_ids": document_ids}
        head = self.get_submodule(self.head_path)
        if self.scores or isinstance(head, nn.Identity):  # without a head, the result is hidden states
            return cast(torch.Tensor, head(cast("PreTrainedModel", self).base_model(**inputs, use_cache=False)[0]))
        theirs: Any = type(self)
        return cast(torch.Tensor, theirs.forward(self, **inputs, use_cache=False).logits)

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Compute rotary tables and similar buffers again, in float32, by the model's own initialisation.

        Raises:
            UnsupportedArchitecture: it leaves some as they are.
        """
        model = cast("PreTrainedModel", self)
        for path, module in self.named_modules():
            computed = [name for name in module._non_persistent_buffers_set if getattr(module, name) is not None]
            for name in computed:
                buffer = getattr(module, name)
                unset = torch.full_like(buffer, float("nan"), dtype=torch.float32)
                module.register_buffer(name, unset, persistent=False)
            if computed:
                model._init_weights(module)
            for name in computed:
                if bool(getattr(module, name).isnan().any()):
                    reason = f"its buffer '{path}.{name}' is filled by its constructor alone"
                    raise UnsupportedArchitecture(model=type(self).__name__, reason=reason)


class NumberedLayers(nn.ModuleDict):
    """Layers under their numbers in the whole model, for code that expects a ``ModuleList``: the layers of other
    pipeline stages hand their input on."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__({str(number): layer for number, layer in enumerate(layers)})
        self.count = len(self._modules)
        """Layers of the whole model."""

    def __getitem__(self, key: Any) -> Any:
        """Return the layer of a number, here or elsewhere; those of a slice as a list; a module by its key."""
        if isinstance(key, slice):
            return [self[number] for number in range(self.count)[key]]
        if isinstance(key, int):
            return self._modules.get(str(range(self.count)[key]), lambda hidden, *_, **__: hidden)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        """Yield the layers, as a ``ModuleList`` does; ``keys()`` are the numbers."""
        return iter(self[:])

    def __len__(self) -> int:
        """Return the number of layers of the whole model."""
        return self.count


def build_model(architecture: Architecture, calls: Mapping[str, AttentionCall]) -> CausalLM:
    """Return the model on the current device, mostly meta; attention, experts, dropouts and layers are ours.

    ``calls`` of :func:`trace_model` say what its attention modules compute.

    Raises:
        UnsupportedArchitecture: its embedding or its head is not what it should be.
    """
    model: Any = architecture.new()
    replace_experts(model)
    masks = DocumentMasks()
    for path, call in calls.items():
        attention = model.get_submodule(path)
        core: nn.Module
        if call.sinks is not None:
            core = SinkAttention(scale=call.scale, window=call.window)
        elif call.dropout:  # without a window, a cap, a scale or sinks
            core = CausalAttentionWithDropout(call.dropout, masks)
        else:  # the plain one wherever that suffices
            scale = None if call.scale == call.key_width**-0.5 else call.scale
            semantics = AttentionSemantics(causal=True, scale=scale, window=call.window, softcap=call.softcap)
            core = attention_core(semantics, masks)
        attention.add_module(CORE, core)
        if call.sinks is not None:
            attention.add_module(call.sinks, HeadValues(attention._parameters.pop(call.sinks)))
    layers = next(iter(calls)).partition(".0.")[0]
    model.set_submodule(layers, NumberedLayers(model.get_submodule(layers)))
    for path, module in list(model.named_modules()):
        if type(module) is nn.Dropout:
            model.set_submodule(path, Dropout(module.p))
        if getattr(module, "rope_type", None) == "longrope":  # other frequencies in longer texts, as in our module
            module.original = module.config.rope_parameters["original_max_position_embeddings"]
            module.keys_unchanged = functools.partial(_kept, module.original)
    embedding = model.get_input_embeddings()
    model.embedding_path = _path_of(model, embedding, "embedding")
    if type(embedding).forward is not nn.Embedding.forward:  # one with a factor (Gemma) becomes one of torch's
        scale = getattr(embedding, "scalar_embed_scale", None)
        if not isinstance(embedding, nn.Embedding) or not isinstance(scale, (int, float)):
            kind = type(embedding).__name__
            reason = f"its embedding '{model.embedding_path}' is a {kind}, whose forward is not known"
            raise UnsupportedArchitecture(model=type(model).__name__, reason=reason)
        rows, width = embedding.weight.shape
        plain = nn.Embedding(rows, width, padding_idx=embedding.padding_idx)
        plain.weight = embedding.weight
        model.set_submodule(model.embedding_path, plain)
        model.embedding_scale = float(scale)
    else:
        model.embedding_scale = None
    model.scores = architecture.scores
    head = getattr(model, "score", None) if model.scores else model.get_output_embeddings()
    model.head_path = _path_of(model, head, "head")
    for _, block in mixtures(model, layers):
        block.register_forward_hook(end_with_sum)
    balance = router_balance(architecture, model)
    if balance is not None:
        model.base_model.register_forward_pre_hook(balance.ask, with_kwargs=True)
        model.base_model.register_forward_hook(balance.join)
    for method in (CausalLM.forward, CausalLM.reset_buffers):  # partial, so that a copy or a pickled one has its own
        setattr(model, method.__name__, functools.partial(method, model))
    return cast(CausalLM, model)


def _kept(original: int, shortest: int, longest: int) -> bool:
    return longest <= original or shortest > original


def _path_of(model: nn.Module, part: nn.Module | None, what: str) -> str:
    path: str | None = next((path for path, module in model.named_modules() if module is part), None)
    if path is not None:
        return path
    raise UnsupportedArchitecture(model=type(model).__name__, reason=f"it has no {what} module")


def pass_hidden_by_position(module: nn.Module) -> None:
    """Let the first argument of ``module``, which transformers gives by keyword, come by position, where plans look."""
    first = next(iter(inspect.signature(module.forward).parameters))
    module.register_forward_pre_hook(functools.partial(_moved, first), with_kwargs=True)


def _moved(
    first: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args or first not in kwargs:
        return args, kwargs
    return (kwargs.pop(first),), kwargs
