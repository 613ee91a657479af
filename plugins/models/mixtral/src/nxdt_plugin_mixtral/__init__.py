"""Entry module of ``nxdt-plugin-mixtral``: declares the component; the model is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import ModelComponent, hookimpl


@hookimpl
def nxdt_model_builders() -> list[ModelComponent]:
    """Declare the Mixtral builder."""
    return [
        ModelComponent(
            name="mixtral",
            target="nxdt_plugin_mixtral.builder:MixtralBuilder",
            config="nxdt_plugin_mixtral.config:MixtralConfig",
            summary="Mixtral 8x7B, 8x22B: a Llama whose feed-forward blocks are mixtures of experts",
            aliases=("hf_mixtral",),
            capabilities=frozenset({"tp", "sp", "pp", "cp", "ep", "lora"}),
            hf_architectures=("MixtralForCausalLM",),
        )
    ]
