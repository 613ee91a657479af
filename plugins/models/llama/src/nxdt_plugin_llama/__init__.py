"""Entry module of ``nxdt-plugin-llama``: declares the components; a model is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import ModelComponent, hookimpl

_RECOMPUTE_NAMES = ("CoreAttention", "LlamaMLP", "ActivationMultiplyMLP", "LlamaRMSNorm", "LlamaDecoderLayer")


@hookimpl
def nxdt_models() -> list[ModelComponent]:
    """Declare the builders of Llama, Mistral, Qwen2 and Qwen3."""
    return [
        _model(
            "llama",
            "Llama 2, 3, 3.1-3.3: grouped-query attention, rotary embedding, RMSNorm, SwiGLU",
            aliases=("hf_llama",),
        ),
        _model("mistral", "Mistral 7B: a Llama whose attention has a sliding window", aliases=("hf_mistral",)),
        _model("qwen2", "Qwen2 and Qwen2.5: a Llama with biases of queries, keys and values"),
        _model("qwen3", "Qwen3, dense: a Llama whose heads' queries and keys are normalised"),
    ]


def _model(name: str, summary: str, *, aliases: tuple[str, ...] = ()) -> ModelComponent:
    kind = name.title()
    return ModelComponent(
        name=name,
        target=f"nxdt_plugin_llama.builder:{kind}Builder",
        config=f"nxdt_plugin_llama.config:{kind}Config",
        summary=summary,
        aliases=aliases,
        capabilities=frozenset({"tp", "sp", "pp", "cp", "lora"}),
        tried_before_launch=False,
        hf_architectures=(f"{kind}ForCausalLM", f"{kind}ForSequenceClassification"),
        recompute_names=_RECOMPUTE_NAMES,
    )
