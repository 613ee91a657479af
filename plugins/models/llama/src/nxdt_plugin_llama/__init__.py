"""Entry module of ``nxdt-plugin-llama``: declares the components; a model is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import ModelComponent, hookimpl

_RECOMPUTE_NAMES = ("CoreAttention", "LlamaMLP", "ActivationMultiplyMLP", "LlamaRMSNorm", "LlamaDecoderLayer")


@hookimpl
def nxdt_models() -> list[ModelComponent]:
    """Declare the builders of Llama and Mistral."""
    return [
        ModelComponent(
            name="llama",
            target="nxdt_plugin_llama.builder:LlamaBuilder",
            config="nxdt_plugin_llama.config:LlamaConfig",
            summary="Llama 2, 3, 3.1-3.3: grouped-query attention, rotary embedding, RMSNorm, SwiGLU",
            aliases=("hf_llama",),
            capabilities=frozenset({"tp", "sp", "pp", "cp", "lora"}),
            tried_before_launch=False,
            hf_architectures=("LlamaForCausalLM", "LlamaForSequenceClassification"),
            recompute_names=_RECOMPUTE_NAMES,
        ),
        ModelComponent(
            name="mistral",
            target="nxdt_plugin_llama.builder:MistralBuilder",
            config="nxdt_plugin_llama.config:MistralConfig",
            summary="Mistral 7B: a Llama whose attention has a sliding window",
            aliases=("hf_mistral",),
            capabilities=frozenset({"tp", "sp", "pp", "cp", "lora"}),
            tried_before_launch=False,
            hf_architectures=("MistralForCausalLM", "MistralForSequenceClassification"),
            recompute_names=_RECOMPUTE_NAMES,
        ),
    ]
