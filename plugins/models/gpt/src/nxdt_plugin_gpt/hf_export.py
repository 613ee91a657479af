"""Writes a configuration as the ``config.json`` of the Hugging Face family that computes the same. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nxdt_core.protocols.model import KeyMap
from nxdt_plugin_gpt.config import GPTConfig
from nxdt_plugin_gpt.errors import NoHuggingFaceForm
from nxdt_plugin_gpt.hf import FAMILIES
from nxdt_plugin_gpt.hf_family import ACTIVATIONS, HFFamily
from nxdt_plugin_gpt.hf_gpt2 import GPT2
from nxdt_plugin_gpt.hf_neox import BLOCKS, GPT_NEOX

__all__ = ["config_to_hf", "key_map"]

_VOCABULARY = ("embedding.tokens.weight", "lm_head.weight")


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """The ``config.json``, with keys that both transformers 4 and 5 read. Dropout behind the activation, which only
    training knows, has no place in it, nor have the rows that fill the vocabulary up.

    Raises:
        NoHuggingFaceForm: no family computes what this configuration does.
    """
    family = _family_of(config)
    theirs: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    theirs |= {key: allowed[0] for key, allowed in family.only.items() if allowed[0] is not None}
    theirs |= {key: getattr(config, ours) for ours, key in family.keys.items()}
    theirs |= {key: getattr(config, ours) for ours, (key, _) in family.optional_keys.items()}
    return theirs | dict(_FURTHER_KEYS[family.architecture](config))


def key_map(config: GPTConfig) -> tuple[KeyMap, ...]:
    """One entry a parameter; a tied head has none of its own. Rows that fill the vocabulary up are ours alone.

    Raises:
        NoHuggingFaceForm: no family has these parameters.
    """
    tied = config.share_embeddings_and_output_weights
    entries = (
        entry
        for entry in _family_of(config).key_map(config.num_attention_heads)
        if not (tied and entry.name == "lm_head.weight")
    )
    if config.vocab_rows == config.vocab_size:
        return tuple(entries)
    return tuple(
        replace(entry, transform="pad", sections=(config.vocab_size,)) if entry.name in _VOCABULARY else entry
        for entry in entries
    )


def _family_of(config: GPTConfig) -> HFFamily:
    obstacles = {architecture: list(of(config)) for architecture, of in _OBSTACLES.items()}
    for architecture, found in obstacles.items():
        if not found:
            return FAMILIES[architecture]
    raise NoHuggingFaceForm(obstacles=obstacles)


def _activation_to_hf(config: GPTConfig) -> str:
    """Their name of the activation."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)


def _common_obstacles(config: GPTConfig) -> Iterator[str]:
    """What neither family has."""
    if config.normalization != "layernorm":
        yield f"normalization {config.normalization}"
    if config.activation not in ACTIVATIONS.values():
        yield f"activation {config.activation}"
    if not config.has_bias:
        yield "has_bias false"
    if not config.fused_qkv:
        yield "fewer key than query heads"
    if config.head_size * config.num_attention_heads != config.hidden_size:
        yield "kv_channels other than hidden_size / num_attention_heads"


def _gpt2_keys(config: GPTConfig) -> dict[str, Any]:
    return {
        "activation_function": _activation_to_hf(config),
        "embd_pdrop": config.hidden_dropout,
        "resid_pdrop": config.hidden_dropout,
        "n_inner": config.ffn_size,
    }


def _gpt2_obstacles(config: GPTConfig) -> Iterator[str]:
    yield from _common_obstacles(config)
    if config.position_embedding_type != "learned_absolute":
        yield f"position_embedding_type {config.position_embedding_type}"
    if config.transformer_block_type != "pre_ln":
        yield f"transformer_block_type {config.transformer_block_type}"


def _neox_keys(config: GPTConfig) -> dict[str, Any]:
    base = config.position_freq_base * config.position_abf_factor
    factor = config.positition_interpolation_factor
    rope = {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
    return {
        "hidden_act": _activation_to_hf(config),
        "use_parallel_residual": config.transformer_block_type == "gpt_j",
        "attention_bias": True,
        "intermediate_size": config.ffn_size,
        "rotary_pct": config.rotary_percentage,
        "rotary_emb_base": base,
        "rope_parameters": {**rope, "rope_theta": base, "partial_rotary_factor": config.rotary_percentage},
    }


def _neox_obstacles(config: GPTConfig) -> Iterator[str]:
    yield from _common_obstacles(config)
    if config.position_embedding_type != "rope":
        yield f"position_embedding_type {config.position_embedding_type}"
    if config.transformer_block_type not in BLOCKS.values():
        yield f"transformer_block_type {config.transformer_block_type}"


_FURTHER_KEYS: Mapping[str, Callable[[GPTConfig], Mapping[str, Any]]] = {
    GPT2.architecture: _gpt2_keys,
    GPT_NEOX.architecture: _neox_keys,
}
"""Further keys of theirs, by architecture."""
_OBSTACLES: Mapping[str, Callable[[GPTConfig], Iterator[str]]] = {
    GPT2.architecture: _gpt2_obstacles,
    GPT_NEOX.architecture: _neox_obstacles,
}
"""By architecture: why it does not compute what a configuration says; nothing where it does."""
