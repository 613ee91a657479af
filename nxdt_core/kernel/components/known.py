"""Which distribution offers a component or reads an architecture, where none that is installed does: our own plugins.

It serves one sentence, ``pip install nxdt-plugin-mixtral``, where a name is unknown. Plugins of third parties are
not listed; a name that is missing here only loses that sentence.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

__all__ = ["known_offers", "offering_dist", "reading_model", "serving_dist"]

_COMPONENTS: Final = {
    ("model_builder", "llama"): "nxdt-plugin-llama",
    ("model_builder", "gpt"): "nxdt-plugin-gpt",
    ("model_builder", "mistral"): "nxdt-plugin-llama",
    ("model_builder", "mixtral"): "nxdt-plugin-mixtral",
    ("model_builder", "hf"): "nxdt-plugin-hf",
    ("dataloader", "text"): "nxdt-plugin-text",
    ("dataloader", "megatron"): "nxdt-plugin-megatron-data",
    ("dataloader", "megatron-data"): "nxdt-plugin-megatron-data",
    ("dataloader", "hf"): "nxdt-plugin-hf-data",
    ("dataloader", "hf-data"): "nxdt-plugin-hf-data",
    ("dataloader", "sft-chat"): "nxdt-plugin-sft-chat",
    ("checkpoint_storage", "s3"): "nxdt-plugin-s3",
    ("checkpoint_storage", "fsx"): "nxdt-plugin-fsx",
    ("adapter", "lora"): "nxdt-plugin-lora",
    ("dataloader", "preference"): "nxdt-plugin-preference",
    ("objective", "dpo"): "nxdt-plugin-preference",
    ("objective", "orpo"): "nxdt-plugin-preference",
    ("checkpoint_format", "neuronx"): "nxdt-plugin-migrate",
    ("metric", "rouge"): "nxdt-plugin-evaluate",
    ("task_suite", "lm-eval"): "nxdt-plugin-evaluate",
    ("config_migration", "nxdt"): "nxdt-plugin-migrate",
    ("config_migration", "nemo"): "nxdt-plugin-migrate",
    ("config_migration", "nnm"): "nxdt-plugin-migrate",
}

_ARCHITECTURES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "GPT2LMHeadModel": "gpt",
    "GPTNeoXForCausalLM": "gpt",
    "*ForCausalLM": "hf",
    "*LMHeadModel": "hf",
}


def offering_dist(kind: str, name: str) -> str | None:
    """Distribution that offers the component, however the name is written (``SFT_Chat``, ``Mixtral``)."""
    return _COMPONENTS.get((kind, name.lower().replace("_", "-")))


def known_offers(kind: str) -> dict[str, list[str]]:
    """Names of the components of ``kind`` that each distribution offers, by distribution."""
    offers: dict[str, list[str]] = {}
    for (of, name), dist in _COMPONENTS.items():
        if of == kind:
            offers.setdefault(dist, []).append(name)
    return offers


def reading_model(architecture: str) -> str | None:
    """Name of the model that is built from a Hugging Face ``config.json`` with that architecture."""
    return next((name for pattern, name in _ARCHITECTURES.items() if fnmatchcase(architecture, pattern)), None)


def serving_dist(scheme: str) -> str | None:
    """Distribution that serves ``scheme://`` locations of checkpoints."""
    return _COMPONENTS.get(("checkpoint_storage", scheme.lower()))
