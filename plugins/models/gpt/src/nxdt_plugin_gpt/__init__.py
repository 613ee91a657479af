"""Entry module of ``nxdt-plugin-gpt``: declares the component; the model is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import ModelComponent, hookimpl


@hookimpl
def nxdt_models() -> list[ModelComponent]:
    """Declare the GPT builder."""
    return [
        ModelComponent(
            name="gpt",
            target="nxdt_plugin_gpt.builder:GPTBuilder",
            config="nxdt_plugin_gpt.config:GPTConfig",
            summary="GPT-2, GPT-NeoX, Pythia and what Megatron makes of them: norms, activations, blocks, positions",
            aliases=("megatron_gpt",),
            capabilities=frozenset({"tp", "sp", "pp", "cp", "lora"}),
            tried_before_launch=False,
            hf_architectures=(
                *("GPT2LMHeadModel", "GPT2ForSequenceClassification"),
                *("GPTNeoXForCausalLM", "GPTNeoXForSequenceClassification"),
            ),
            recompute_names=("CoreAttention", "MLP", "ActivationMultiplyMLP", "Norm", "DecoderLayer"),
        )
    ]
