"""Correspondence to ``MixtralForCausalLM`` of Hugging Face: configuration and names of parameters. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxdt_core.config.huggingface.values import HFValues, number_of, rope_of
from nxdt_core.errors.models import HFUnsupported
from nxdt_core.protocols.model import KeyMap

__all__ = ["IGNORED", "VALUES", "config_from_hf", "key_map"]

IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq", "lm_head.weight")
"""Tensors that a directory may hold and no parameter needs: rotary tables of old exports, and the head beside a tied
embedding (with an untied one the key map takes it)."""

VALUES = HFValues(
    model="mixtral",
    required={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "num_attention_heads": "num_attention_heads",
        "vocab_size": "vocab_size",
    },
    optional={
        "num_kv_heads": ("num_key_value_heads", 8),
        "head_dim": ("head_dim", None),
        "max_position_embeddings": ("max_position_embeddings", 131072),
        "layernorm_epsilon": ("rms_norm_eps", 1e-5),
        "share_embeddings_and_output_weights": ("tie_word_embeddings", False),
        "init_method_std": ("initializer_range", 0.02),
        "sliding_window": ("sliding_window", None),
        "moe.num_experts": ("num_local_experts", 8),
        "moe.top_k": ("num_experts_per_tok", 2),
        "moe.router_aux_loss_coef": ("router_aux_loss_coef", 0.001),
    },
    only={
        "hidden_act": ("silu", "swish"),
        "attention_dropout": (0.0,),
        "router_jitter_noise": (0.0,),
        "quantization_config": (None,),
    },
)

_PARAMETERS = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.q_proj.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.k_proj.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.v_proj.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.o_proj.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.mlp_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.moe.router.weight": "model.layers.*.block_sparse_moe.gate.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}

_EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""One tensor an expert in the directory. transformers 5 stacks them in memory, and still writes them so."""


def config_from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of :class:`MixtralConfig`, dotted below ``moe``, from those of a ``config.json`` of transformers 4 or 5.

    Its ``output_router_logits`` is left alone: there it is off in released files, which are made for inference.

    Raises:
        HFUnsupported: the model has a feature that is not implemented.
        HFFileDamaged: a size is missing.
    """
    ours = VALUES.read(hf_config)
    rope = {key: hf_config[key] for key in ("rope_theta",) if key in hf_config} | dict(rope_of(hf_config))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise HFUnsupported(model="mixtral", key="rope_type", found=kind, supported="'default'")
    ours["rope_theta"] = number_of(rope, "rope_theta", 1_000_000.0)
    ours["use_scaled_init_method"] = False
    return ours


def key_map(*, tied: bool) -> tuple[KeyMap, ...]:
    """One entry a parameter; a tied head has none of its own."""
    plain = (
        KeyMap(name=ours, hf_names=(theirs,))
        for ours, theirs in _PARAMETERS.items()
        if not (tied and ours == "lm_head.weight")
    )
    experts = (
        KeyMap(
            name=f"layers.*.moe.experts.{ours}",
            hf_names=(f"model.layers.*.block_sparse_moe.experts.*.{theirs}.weight",),
            transform="stack",
        )
        for ours, theirs in _EXPERTS.items()
    )
    return (*plain, *experts)
