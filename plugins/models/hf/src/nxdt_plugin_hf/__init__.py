"""Entry module of ``nxdt-plugin-hf``: declares the component; transformers is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import ModelComponent, hookimpl


@hookimpl
def nxdt_model_builders() -> list[ModelComponent]:
    """Declare the builder of transformers' causal language models."""
    return [
        ModelComponent(
            name="hf",
            target="nxdt_plugin_hf.builder:HFBuilder",
            config="nxdt_plugin_hf.config:HFModelConfig",
            summary="any causal language model of transformers, by its config.json or directory",
            aliases=("transformers",),
            capabilities=frozenset({"tp", "sp", "pp", "cp"}),
            hf_architectures=("*ForCausalLM", "*LMHeadModel"),
        )
    ]
