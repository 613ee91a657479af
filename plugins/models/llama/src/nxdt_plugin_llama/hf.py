"""Correspondence to ``LlamaForCausalLM`` of Hugging Face: configuration and names of parameters. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nxdt_core.errors import HFFileDamaged, HFUnsupported
from nxdt_core.protocols.model import KeyMap

if TYPE_CHECKING:
    from nxdt_plugin_llama.config import LlamaConfig

__all__ = ["IGNORED", "config_from_hf", "config_to_hf", "key_map"]

IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq", "lm_head.weight")
"""Tensors that a directory may hold and no parameter needs: rotary tables of old exports, and the head beside a tied
embedding (with an untied one the key map takes it)."""

_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
"""Ours → theirs, where a file must have the key."""

_OPTIONAL_KEYS: Mapping[str, tuple[str, Any]] = {
    "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "max_position_embeddings": ("max_position_embeddings", 2048),
    "layernorm_epsilon": ("rms_norm_eps", 1e-6),
    "share_embeddings_and_output_weights": ("tie_word_embeddings", False),
    "init_method_std": ("initializer_range", 0.02),
}
"""Ours → theirs, and what transformers takes where a file lacks the key."""

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", "swish", None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}
"""Features of which one value is implemented; the first is named in the error."""

_SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

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


def config_from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of :class:`LlamaConfig` from those of a ``config.json``, written by transformers 4 or 5.

    Raises:
        HFUnsupported: the model has a feature that is not implemented.
        HFFileDamaged: a size is missing.
    """
    for key, allowed in _ONLY.items():
        if hf_config.get(key) not in allowed:
            raise HFUnsupported(model="llama", key=key, found=hf_config[key], supported=repr(allowed[0]))
    missing = [theirs for theirs in _KEYS.values() if theirs not in hf_config]
    if missing:
        raise HFFileDamaged(path="config.json", reason=f"it has no {', '.join(missing)}")
    ours = {key: hf_config[theirs] for key, theirs in _KEYS.items()}
    ours |= {key: hf_config.get(theirs, default) for key, (theirs, default) in _OPTIONAL_KEYS.items()}
    # transformers 5 writes one mapping, rope_parameters; 4 wrote rope_theta beside rope_scaling.
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    ours["rope_theta"] = float(rope.get("rope_theta", hf_config.get("rope_theta", 10_000.0)))
    ours["rope_scaling"] = _scaling_from_hf(rope, ours["max_position_embeddings"])
    ours["use_scaled_init_method"] = False
    return ours


def _scaling_from_hf(rope: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise HFUnsupported(model="llama", key="rope_type", found=kind, supported="'default', 'linear' and 'llama3'")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        found = rope["partial_rotary_factor"]
        raise HFUnsupported(model="llama", key="partial_rotary_factor", found=found, supported="1.0")
    if kind == "default":
        return None
    scaling = {"rope_type": kind} | {key: rope[key] for key in _SCALING_KEYS if key in rope}
    if kind == "llama3":
        scaling.setdefault("original_max_position_embeddings", max_position_embeddings)
    return scaling


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The ``config.json``, with keys that both transformers 4 and 5 read."""
    theirs: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
    }
    theirs |= {key: getattr(config, ours) for ours, key in _KEYS.items()}
    theirs |= {key: getattr(config, ours) for ours, (key, _) in _OPTIONAL_KEYS.items()}
    theirs |= {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size}
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind != "default":
        values = {key: getattr(scaling, key) for key in _SCALING_KEYS if getattr(scaling, key) is not None}
        theirs["rope_scaling"] = {"rope_type": scaling.kind} | values
    return theirs


def key_map(*, tied: bool) -> tuple[KeyMap, ...]:
    """One entry a parameter; a tied head has none of its own."""
    return tuple(
        KeyMap(name=f"{ours}.weight", hf_names=(f"{theirs}.weight",))
        for ours, theirs in _PARAMETERS.items()
        if not (tied and ours == "lm_head")
    )
