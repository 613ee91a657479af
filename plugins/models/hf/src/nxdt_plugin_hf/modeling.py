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

from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.random.dropout import Dropout
from nxdt_plugin_hf.architecture import Architecture
from nxdt_plugin_hf.attention import CORE, AttentionCall, HeadValues, core_for
from nxdt_plugin_hf.errors import UnsupportedArchitecture
from nxdt_plugin_hf.mixtures import end_with_sum, mixtures, replace_experts, router_balance

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits [batch, seq, vocab] of ``input_ids`` int64 [batch, seq].

        Args:
            input_ids: tokens.
            position_ids: int64 [batch, seq]; None for 0, 1, 2, …
            document_ids: int64 [batch, seq]; tokens attend within their own document only. None: one document a row.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        hidden = CausalLM._embedded(self, input_ids)  # [batch, seq, hidden]
        given = {"inputs_embeds": hidden, "position_ids": position_ids, "document_ids": document_ids}
        if isinstance(self.get_submodule(self.head_path), nn.Identity):  # without a head, the result is hidden states
            return cast(torch.Tensor, cast("PreTrainedModel", self).base_model(**given, use_cache=False)[0])
        theirs: Any = type(self)
        return cast(torch.Tensor, theirs.forward(self, **given, use_cache=False).logits)

    def _embedded(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedding = self.get_submodule(self.embedding_path)
        hidden: torch.Tensor = embedding(input_ids)
        if self.embedding_scale is None or isinstance(embedding, nn.Identity):
            return hidden
        return hidden * hidden.new_full((), self.embedding_scale)  # rounded to the dtype first, as transformers does

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
                found = getattr(module, name)
                unset = torch.full_like(found, float("nan"), dtype=torch.float32)
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
        """The layer of a number, here or elsewhere; those of a slice as a list; a module by its key."""
        if isinstance(key, slice):
            return [self[number] for number in range(self.count)[key]]
        if isinstance(key, int):
            return self._modules.get(str(range(self.count)[key]), _elsewhere)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        """The layers, as a ``ModuleList`` does; ``keys()`` are the numbers."""
        return iter(self[:])

    def __len__(self) -> int:
        """Layers of the whole model."""
        return self.count


def _elsewhere(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden


def build_model(architecture: Architecture, calls: Mapping[str, AttentionCall]) -> CausalLM:
    """Return the model on the current device, mostly meta; attention, experts, dropouts and layers are ours.

    Args:
        architecture: of the model.
        calls: what its attention modules compute, from :func:`nxdt_plugin_hf.tracing.trace_model`.

    Raises:
        UnsupportedArchitecture: its embedding or its head is not what it should be.
    """
    model: Any = architecture.new()
    replace_experts(model)
    masks = DocumentMasks()
    for path, call in calls.items():
        attention = model.get_submodule(path)
        attention.add_module(CORE, core_for(call, masks))
        if call.sinks is not None:
            attention.add_module(call.sinks, HeadValues(attention._parameters.pop(call.sinks)))
    layers = next(iter(calls)).partition(".0.")[0]
    model.set_submodule(layers, NumberedLayers(model.get_submodule(layers)))
    for path, module in list(model.named_modules()):
        if type(module) is nn.Dropout:
            model.set_submodule(path, Dropout(module.p))
        if getattr(module, "rope_type", None) == "longrope":  # other frequencies in longer texts, as in our module
            module.original = module.config.rope_parameters["original_max_position_embeddings"]
            module.kept = functools.partial(_kept, module.original)
    model.embedding_path, model.embedding_scale = _plain_embedding(model)
    model.head_path = _path_of(model, model.get_output_embeddings(), "head")
    for _, block in mixtures(model, layers):
        end_with_sum(block)
    balance = router_balance(architecture, model)
    if balance is not None:
        model.base_model.register_forward_pre_hook(balance.ask, with_kwargs=True)
        model.base_model.register_forward_hook(balance.join)
    for method in (CausalLM.forward, CausalLM.reset_buffers):  # partial, so that a copy or a pickled one has its own
        setattr(model, method.__name__, functools.partial(method, model))
    return cast(CausalLM, model)


def _kept(original: int, shortest: int, longest: int) -> bool:
    return longest <= original or shortest > original


def _plain_embedding(model: Any) -> tuple[str, float | None]:
    """The path of the embedding, made one of torch's where it is one with a factor (Gemma), and the factor."""
    embedding = model.get_input_embeddings()
    path = _path_of(model, embedding, "embedding")
    if type(embedding).forward is nn.Embedding.forward:
        return path, None
    scale = getattr(embedding, "scalar_embed_scale", None)
    if not isinstance(embedding, nn.Embedding) or not isinstance(scale, (int, float)):
        reason = f"its embedding '{path}' is a {type(embedding).__name__}, whose forward is not known"
        raise UnsupportedArchitecture(model=type(model).__name__, reason=reason)
    rows, width = embedding.weight.shape
    plain = nn.Embedding(rows, width, padding_idx=embedding.padding_idx)
    plain.weight = embedding.weight
    model.set_submodule(path, plain)
    return path, float(scale)


def _path_of(model: nn.Module, part: nn.Module | None, what: str) -> str:
    found: str | None = next((path for path, module in model.named_modules() if module is part), None)
    if found is not None:
        return found
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
