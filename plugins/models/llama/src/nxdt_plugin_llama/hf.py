"""Correspondence to models of Hugging Face: configuration and names of parameters. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nxdt_core.config.huggingface.values import HFValues, number_of, rope_of
from nxdt_core.errors.models import HFUnsupported
from nxdt_core.protocols.model import KeyMap

__all__ = ["IGNORED", "LLAMA", "MISTRAL", "SCALING_KEYS", "HFFamily", "config_from_hf", "key_map"]

IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq", "lm_head.weight")
"""Tensors that a directory may hold and no parameter needs: rotary tables of old exports, and the head beside a tied
embedding (with an untied one the key map takes it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFFamily:
    """What tells the models of this plugin apart in a ``config.json``."""

    architecture: str
    values: HFValues


_REQUIRED = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}

_OPTIONAL: Mapping[str, tuple[str, Any]] = {
    "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "max_position_embeddings": ("max_position_embeddings", 2048),
    "layernorm_epsilon": ("rms_norm_eps", 1e-6),
    "share_embeddings_and_output_weights": ("tie_word_embeddings", False),
    "init_method_std": ("initializer_range", 0.02),
}

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0,),
    "quantization_config": (None,),
}

LLAMA = HFFamily(
    architecture="LlamaForCausalLM",
    values=HFValues(
        model="llama",
        required=_REQUIRED,
        optional=_OPTIONAL,
        only={"attention_bias": (False,), "mlp_bias": (False,), **_ONLY},
    ),
)

MISTRAL = HFFamily(
    architecture="MistralForCausalLM",
    values=HFValues(
        model="mistral",
        required=_REQUIRED,
        optional={
            **_OPTIONAL,
            "num_kv_heads": ("num_key_value_heads", 8),
            "max_position_embeddings": ("max_position_embeddings", 131072),
            "sliding_window": ("sliding_window", 4096),
        },
        only=_ONLY,
    ),
)

SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Numbers of a ``rope_scaling``, of the same name in both programs."""

_PARAMETERS = {
    "embed_tokens": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.q_proj": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.k_proj": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.v_proj": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.o_proj": "model.layers.*.self_attn.o_proj",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp.gate_proj": "model.layers.*.mlp.gate_proj",
    "layers.*.mlp.up_proj": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.down_proj": "model.layers.*.mlp.down_proj",
    "norm": "model.norm",
    "lm_head": "lm_head",
}


def config_from_hf(hf_config: Mapping[str, Any], family: HFFamily) -> dict[str, Any]:
    """Keys of the family's configuration from those of a ``config.json``, written by transformers 4 or 5.

    Raises:
        HFUnsupported: the model has a feature that is not implemented.
        HFFileDamaged: a size is missing.
    """
    ours = family.values.read(hf_config)
    rope = {key: hf_config[key] for key in ("rope_theta", "partial_rotary_factor") if key in hf_config}
    rope |= rope_of(hf_config)
    ours["rope_theta"] = number_of(rope, "rope_theta", 10_000.0)
    ours["rope_scaling"] = _scaling_from_hf(rope, family.values.model, ours["max_position_embeddings"])
    ours["use_scaled_init_method"] = False
    return ours


def _scaling_from_hf(rope: Mapping[str, Any], model: str, max_position_embeddings: int) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise HFUnsupported(model=model, key="rope_type", found=kind, supported="'default', 'linear' and 'llama3'")
    found = rope.get("partial_rotary_factor")
    if found not in (1.0, None):
        raise HFUnsupported(model=model, key="partial_rotary_factor", found=found, supported="1.0")
    if kind == "default":
        return None
    scaling = {"rope_type": kind} | {key: rope[key] for key in SCALING_KEYS if key in rope}
    if kind == "llama3":
        scaling.setdefault("original_max_position_embeddings", max_position_embeddings)
    return scaling


def key_map(*, tied: bool) -> tuple[KeyMap, ...]:
    """One entry a parameter; a tied head has none of its own."""
    return tuple(
        KeyMap(name=f"{ours}.weight", hf_names=(f"{theirs}.weight",))
        for ours, theirs in _PARAMETERS.items()
        if not (tied and ours == "lm_head")
    )
