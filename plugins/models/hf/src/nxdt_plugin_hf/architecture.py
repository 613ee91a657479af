"""From the values of a ``config.json`` to transformers' own configuration and class; no other code is ever run."""

from __future__ import annotations

import copy
import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nxdt_core.config.huggingface import architectures_of
from nxdt_core.errors.base import one_of
from nxdt_core.errors.models import HFUnsupported
from nxdt_core.models.huggingface import read_floats
from nxdt_plugin_hf.errors import (
    ArchitectureUnknown,
    ConfigurationRefused,
    NotACausalLM,
    OwnCodeRefused,
    PackageMissing,
    UnsupportedArchitecture,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


IMPLEMENTATION = "nxdt"
"""Name of the attention function in transformers."""
CORE = "attention_core"
"""Attribute of an attention module that holds its core."""
NOTED = "noted_calls"
"""Attribute of the modules of a model without cores, whose calls of attention are noted and not computed."""

_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "is_causal"}
)
"""Further arguments that models pass, without a meaning for attention that is causal."""


_TRANSFORMERS = "transformers>=5.17,<6"
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_NOT_OF_THE_MODEL = ("auto_map", "quantization_config", *_IMPLEMENTATIONS, *(f"_{key}" for key in _IMPLEMENTATIONS))
"""Keys of ``config.json`` that are not read. Code is not taken from where it names it: transformers downloads and runs
kernels that ``attn_implementation`` names, where the package ``kernels`` is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Arguments with which one module calls attention."""

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    scale: float
    window: int | None
    """Tokens that are seen, the own included; None: all earlier ones."""
    softcap: float | None
    """Scores are ``softcap · tanh(score / softcap)``."""
    dropout: float
    sinks: str | None
    """Name of the module's parameter with a score per head that has no value; None: there is none."""
    causal: bool
    documents: bool
    """True if ``document_ids`` reached the call."""
    unknown: tuple[str, ...]
    """Arguments that no core of ours honours."""


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    document_ids: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[batch, heads, seq, width] each to [batch, seq, heads, width]."""
    core = getattr(module, CORE, None)
    if core is not None:
        sinks = {} if s_aux is None else {"sinks": s_aux()}
        attended: torch.Tensor = core(query, key, value, document_ids, **sinks)
        return attended.transpose(1, 2).contiguous(), None  # of which some models take a view
    unknown = {name for name, argument in others.items() if argument is not None and name not in _HARMLESS}
    name = next((name for name, parameter in module.named_parameters(recurse=False) if parameter is s_aux), None)
    if s_aux is not None and name is None:
        unknown.add("s_aux")
    getattr(module, NOTED)[module] = AttentionCall(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        key_width=query.shape[-1],
        value_width=value.shape[-1],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        dropout=dropout,
        sinks=name,
        causal=bool(others.get("is_causal", getattr(module, "is_causal", True))),
        documents=document_ids is not None,
        unknown=tuple(sorted(unknown | ({"attention_mask"} if attention_mask is not None else set()))),
    )
    return value.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1])), None


class HeadValues(nn.Module):
    """In the place of a parameter [heads, …] of an attention module, so that tensor parallelism can shard it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self) -> torch.Tensor:
        """Return the values of this process's heads."""
        return self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model of transformers."""

    config: PreTrainedConfig
    """Configuration of the model, which must not be changed."""
    model_class: type[PreTrainedModel]
    """The model's ``…ForCausalLM``; its ``…ForSequenceClassification`` where it has scores."""
    scores: bool = False
    """True if it has a score per token in place of logits."""

    @property
    def name(self) -> str:
        """``Qwen3ForCausalLM``."""
        return self.model_class.__name__

    def plain(self) -> PreTrainedModel:
        """Return the model as transformers builds it, on the current device."""
        return self.model_class(copy.deepcopy(self.config))

    def new(self) -> PreTrainedModel:
        """Return the same with our attention, with routers whose logits are not kept unless requested, and with
        parameters that are not trained in place of saved buffers, but for integers: these are drawn, sharded, saved and
        exchanged with the others."""
        from transformers import AttentionInterface

        AttentionInterface.register(IMPLEMENTATION, _attend)
        config = copy.deepcopy(self.config)
        config._attn_implementation = IMPLEMENTATION
        if getattr(config, "output_router_logits", None):
            config.output_router_logits = False
        model = self.model_class(config)
        for module in model.modules():
            for name in sorted(module._buffers.keys() - module._non_persistent_buffers_set):
                buffer = module._buffers[name]
                if buffer is not None and buffer.is_floating_point():
                    del module._buffers[name]
                    module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
        return model


def read_architecture(values: Mapping[str, Any], *, scores: bool = False) -> Architecture:
    """Return the configuration and the class that ``values`` of a ``config.json`` describe; with ``scores`` those of
    its sequence classifier with one label.

    Raises:
        PackageMissing: transformers, or what the model's code imports, is not installed.
        OwnCodeRefused: the code is not transformers' but next to the file.
        ArchitectureUnknown: the installed transformers has no such model.
        ConfigurationRefused: it does not accept the values.
        NotACausalLM: it has, and the model does not predict next tokens.
        UnsupportedArchitecture: it has no sequence classifier of the type.
    """
    for name in ("torchao", "torch.utils._pytree"):
        # Classes of models import torchao where it is installed, which warns of its extensions for other devices.
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise PackageMissing(wanted="The model 'hf'", reason=str(error), package=_TRANSFORMERS) from error
    model_type = str(values.get("model_type", ""))
    if model_type not in transformers.CONFIG_MAPPING:
        own_code = values.get("auto_map")
        if own_code:
            classes = ", ".join(map(str, own_code.values() if isinstance(own_code, Mapping) else [own_code]))
            raise OwnCodeRefused(model_type=model_type, classes=classes)
        near = difflib.get_close_matches(model_type, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), n=2)
        close = f" Did you mean {one_of(near)}?" if near else ""
        raise ArchitectureUnknown(model_type=model_type, version=transformers.__version__, close=close)
    quantized = values.get("quantization_config")
    if quantized and not (isinstance(quantized, Mapping) and quantized.get("quant_method") == "mxfp4"):
        raise HFUnsupported(model=model_type, key="quantization_config", found=quantized, supported="None or MXFP4")
    labels = {"id2label": None, "label2id": None, "num_labels": 1} if scores else {}
    plain = read_floats({key: value for key, value in {**values, **labels}.items() if key not in _NOT_OF_THE_MODEL})
    theirs = f"transformers' {model_type}"
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(plain)
    except ImportError as error:
        raise PackageMissing(wanted=theirs, reason=str(error), package=error.name or _TRANSFORMERS) from error
    except Exception as error:  # checks in a model's code may raise any exception
        reason = " ".join(str(error).split())
        raise ConfigurationRefused(model_type=model_type, reason=reason.rstrip(".")) from error

    # What shows in the configuration; the trace of the model shows whether tokens look ahead.
    named, causal = architectures_of(values), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    model = named[0] if named else f"model_type {config.model_type!r}"
    if config.is_encoder_decoder:
        raise NotACausalLM(model=model, reason="it is an encoder with a decoder")
    if causal is None:
        raise NotACausalLM(model=model, reason="transformers has no causal language model of this type")
    causal = (causal,) if isinstance(causal, str) else causal
    if named and not set(named) & set(causal) and not scores:
        raise NotACausalLM(model=model, reason=f"the causal model of its type is {causal[0]}")
    if config.get_text_config() is not config or not hasattr(config, "vocab_size"):
        raise NotACausalLM(model=model, reason="it has more than a text model, whose own config.json is needed")
    mapping = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    try:
        if scores and type(config) not in mapping:
            raise UnsupportedArchitecture(
                model=model_type, reason="transformers has no sequence classifier of this type for model.score_head"
            )
        model_class = (mapping if scores else transformers.MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    except ImportError as error:
        raise PackageMissing(wanted=theirs, reason=str(error), package=error.name or _TRANSFORMERS) from error
    return Architecture(config=config, model_class=model_class, scores=scores)
