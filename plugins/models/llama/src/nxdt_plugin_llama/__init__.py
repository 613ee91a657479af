"""Entry module of ``nxdt-plugin-llama``: declares the component; the model is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import ModelComponent, hookimpl


@hookimpl
def nxdt_model_builders() -> list[ModelComponent]:
    """Declare the Llama builder."""
    return [
        ModelComponent(
            name="llama",
            target="nxdt_plugin_llama.builder:LlamaBuilder",
            config="nxdt_plugin_llama.config:LlamaConfig",
            summary="Llama 2, 3, 3.1-3.3: grouped-query attention, rotary embedding, RMSNorm, SwiGLU",
            aliases=("hf_llama",),
            capabilities=frozenset({"tp", "sp", "pp", "cp", "lora"}),
            hf_architectures=("LlamaForCausalLM",),
        )
    ]
