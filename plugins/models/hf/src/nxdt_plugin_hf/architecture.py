"""From the values of a ``config.json`` to transformers' own configuration and class; no other code is ever run."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from nxdt_core.config.huggingface import architectures_of
from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import one_of
from nxdt_core.errors.models import HFUnsupported
from nxdt_core.models.huggingface import read_floats
from nxdt_plugin_hf.attention import IMPLEMENTATION, register
from nxdt_plugin_hf.errors import (
    ArchitectureUnknown,
    ConfigurationRefused,
    NotACausalLM,
    OwnCodeRefused,
    PackageMissing,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_TRANSFORMERS = "transformers>=5.17,<6"
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_NOT_OF_THE_MODEL = ("auto_map", "quantization_config", *_IMPLEMENTATIONS, *(f"_{key}" for key in _IMPLEMENTATIONS))
"""Keys of ``config.json`` that are not read. Code is not taken from where it names it: transformers downloads and runs
kernels that ``attn_implementation`` names, where the package ``kernels`` is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model of transformers."""

    config: PreTrainedConfig
    """Configuration of the model, which must not be changed."""
    model_class: type[PreTrainedModel]
    """The model's ``…ForCausalLM``."""

    @property
    def name(self) -> str:
        """``Qwen3ForCausalLM``."""
        return self.model_class.__name__

    def plain(self) -> PreTrainedModel:
        """Return the model as transformers builds it, on the current device."""
        return self.model_class(copy.deepcopy(self.config))

    def new(self) -> PreTrainedModel:
        """Return the same with our attention, with routers whose logits are not kept unless requested, and with no
        saved buffers (:func:`nxdt_plugin_hf.architecture.as_frozen_parameters`)."""
        register()
        config = copy.deepcopy(self.config)
        config._attn_implementation = IMPLEMENTATION
        if getattr(config, "output_router_logits", None):
            config.output_router_logits = False
        model = self.model_class(config)
        as_frozen_parameters(model)
        return model


def read_architecture(values: Mapping[str, Any]) -> Architecture:
    """Return the configuration and the class that ``values`` of a ``config.json`` describe.

    Raises:
        PackageMissing: transformers, or what the model's code imports, is not installed.
        OwnCodeRefused: the code is not transformers' but next to the file.
        ArchitectureUnknown: the installed transformers has no such model.
        ConfigurationRefused: it does not accept the values.
        NotACausalLM: it has, and the model does not predict next tokens.
    """
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise PackageMissing(wanted="The model 'hf'", reason=str(error), package=_TRANSFORMERS) from error
    model_type = str(values.get("model_type", ""))
    if model_type not in transformers.CONFIG_MAPPING:
        raise _unknown(model_type, values, transformers.__version__, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    config = _config(model_type, values)
    _check_causal(config, values, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type))
    try:
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except ImportError as error:
        wanted = f"transformers' {model_type}"
        raise PackageMissing(wanted=wanted, reason=str(error), package=error.name or _TRANSFORMERS) from error
    return Architecture(config=config, model_class=model_class)


def _unknown(model_type: str, values: Mapping[str, Any], version: str, known: list[str]) -> NxdtError:
    own_code = values.get("auto_map")
    if own_code:
        classes = ", ".join(map(str, own_code.values() if isinstance(own_code, Mapping) else [own_code]))
        return OwnCodeRefused(model_type=model_type, classes=classes)
    near = difflib.get_close_matches(model_type, known, n=2)
    close = f" Did you mean {one_of(near)}?" if near else ""
    return ArchitectureUnknown(model_type=model_type, version=version, close=close)


def _config(model_type: str, values: Mapping[str, Any]) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING

    own = read_floats({key: value for key, value in values.items() if key not in _NOT_OF_THE_MODEL})
    quantized = values.get("quantization_config")
    if quantized and not (isinstance(quantized, Mapping) and quantized.get("quant_method") == "mxfp4"):
        raise HFUnsupported(model=model_type, key="quantization_config", found=quantized, supported="None or MXFP4")
    try:
        return CONFIG_MAPPING[model_type].from_dict(own)
    except ImportError as error:
        wanted = f"transformers' {model_type}"
        raise PackageMissing(wanted=wanted, reason=str(error), package=error.name or _TRANSFORMERS) from error
    except Exception as error:  # checks in a model's code may raise any exception
        reason = " ".join(str(error).split())
        raise ConfigurationRefused(model_type=model_type, reason=reason.rstrip(".")) from error


def _check_causal(config: PreTrainedConfig, values: Mapping[str, Any], causal: str | tuple[str, ...] | None) -> None:
    """Refuse what shows in the configuration; :mod:`nxdt_plugin_hf.tracing` sees whether tokens look ahead."""
    named = architectures_of(values)
    model = named[0] if named else f"model_type {config.model_type!r}"
    if config.is_encoder_decoder:
        raise NotACausalLM(model=model, reason="it is an encoder with a decoder")
    if causal is None:
        raise NotACausalLM(model=model, reason="transformers has no causal language model of this type")
    causal = (causal,) if isinstance(causal, str) else causal
    if named and not set(named) & set(causal):
        raise NotACausalLM(model=model, reason=f"the causal model of its type is {causal[0]}")
    if config.get_text_config() is not config or not hasattr(config, "vocab_size"):
        raise NotACausalLM(model=model, reason="it has more than a text model, whose own config.json is needed")


def as_frozen_parameters(model: nn.Module) -> None:
    """Make them parameters that are not trained: these are drawn, sharded, saved and exchanged with the others.

    Integers stay buffers.
    """
    for module in model.modules():
        saved = module._buffers.keys() - module._non_persistent_buffers_set
        for name in sorted(saved):
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_floating_point():
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
