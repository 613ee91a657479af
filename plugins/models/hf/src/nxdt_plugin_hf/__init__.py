"""Entry module of ``nxdt-plugin-hf``: declares the component; transformers is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import CliCommand, ModelComponent, hookimpl


@hookimpl
def nxdt_models() -> list[ModelComponent]:
    """Declare the builder of transformers' causal language models."""
    return [
        ModelComponent(
            name="hf",
            target="nxdt_plugin_hf.builder:HFBuilder",
            config="nxdt_plugin_hf.config:HFModelConfig",
            summary="any causal language model of transformers, by its config.json or directory",
            aliases=("transformers",),
            capabilities=frozenset({"tp", "sp", "pp", "cp", "ep", "lora"}),
            hf_architectures=("*ForCausalLM", "*LMHeadModel", "*ForSequenceClassification"),
            tried_before_launch=True,
        )
    ]


@hookimpl
def nxdt_cli() -> list[CliCommand]:
    """Declare the command that measures a plan."""
    summary = "Show how tensor parallelism shards a model of transformers."
    return [CliCommand(name="sharding", target="nxdt_plugin_hf.command:sharding", summary=summary)]
