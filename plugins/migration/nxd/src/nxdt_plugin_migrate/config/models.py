"""Model plugin that a file of NxD Training means, and parts of the architecture that the plugin gets by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxdt_plugin_migrate.config.document import Document
from nxdt_plugin_migrate.config.renamed_keys import LLAMA_NAMES
from nxdt_plugin_migrate.config.render import TO_SET

_LLAMA_SHAPED: Mapping[str, tuple[Any, ...]] = {
    "normalization": ("rmsnorm",),
    "activation": ("swiglu", "silu"),
    "position_embedding_type": ("rope",),
    "rotary_percentage": (1, None),
    "position_abf_factor": (1, None),
    "positition_interpolation_factor": (1, None),
    "transformer_block_type": ("pre_ln", None),
    "has_bias": (False,),
    "hidden_dropout": (0,),
    "attention_dropout": (0, None),
    "ffn_dropout": (0, None),
}
"""Megatron key → values that are what every Llama, Mistral and Mixtral has; None stands for a key that is missing.

A missing one of the others means something else: ``layernorm``, ``gelu``, learned positions, biases, dropout."""

_VOCABULARY = "model.vocab_size"
_GPT2 = ("GPT2BPETokenizer", "gpt2")


def name_model(document: Document) -> None:
    """Name the model plugin, as NxD Training's script chooses between its models."""
    if "model.name" in document.settings:
        return
    if document.value("model_source", "hf") == "hf":
        mixtral = "mixtral" in str(document.value("name", "")).lower()
        reason = "the run's name contains it" if mixtral else "model_source: hf"
        document.put("model.name", "mixtral" if mixtral else "llama", reason)
        for key in ("num_layers", "hidden_size", "rope_theta"):
            if document.value(f"model.{key}") == -1:
                document.drop(f"model.{key}", "unneeded", "-1 leaves it to model.model_config")
        return
    wanted, reason = _megatron(document)
    document.put("model.name", wanted, reason)
    if wanted != "gpt":
        for key in _LLAMA_SHAPED:
            document.drop(f"model.{key}", "unneeded", f"every {wanted} is so")
        if wanted == "llama":
            document.drop("model.sliding_window_size", "off", "null says that it is not set")
        for old, new in LLAMA_NAMES.items():
            document.move(old, new)
        if document.value("model.head_dim", 0) is None:
            document.drop("model.head_dim", "off", "null says that it is not set")
    if document.value("data.tokenizer.type") in _GPT2:
        document.put(_VOCABULARY, 50257, "GPT-2's number of ids")
    else:
        multiple = document.value("model.make_vocab_size_divisible_by")
        filled = f", filled up to a multiple of {multiple}" if multiple and wanted != "gpt" else ""
        document.put(_VOCABULARY, TO_SET, f"it is taken from the tokenizer there; set its number of ids{filled}")
    if wanted != "gpt":
        document.drop("model.make_vocab_size_divisible_by", "unneeded", f"{_VOCABULARY} says it")


def _megatron(document: Document) -> tuple[str, str]:
    """The plugin of the very architecture, else that of all Megatron's: the same weights, but other formats."""
    if any(document.value(f"model.{key}") not in usual for key, usual in _LLAMA_SHAPED.items()):
        return "gpt", "model_source: megatron"
    for section, name in (("model.moe", "mixtral"), ("model.sliding_window_size", "mistral")):
        if any(document.value(path) is not None for path in document.below(section)):
            return name, f"{section} is given, and all else is what a {name} has"
    return "llama", "the architecture is a Llama's"
