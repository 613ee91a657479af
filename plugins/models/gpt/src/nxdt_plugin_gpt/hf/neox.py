"""``GPTNeoXForCausalLM``, which Pythia is too. Its fused projection has our order: query, key and value by head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nxdt_core.models.huggingface import HFValues, weight_keys
from nxdt_core.models.rope_scaling import number_of, rope_of, scaling_from_hf, scaling_to_hf
from nxdt_core.protocols.model import KeyMap
from nxdt_plugin_gpt.architecture import GPTArchitecture
from nxdt_plugin_gpt.hf.family import ACTIVATIONS, HFFamily, activation_to_hf, common_obstacles, with_biases

_LAYER = "gpt_neox.layers.*"
_MODULES = {
    "layers.*.attention_norm": f"{_LAYER}.input_layernorm",
    "layers.*.mlp_norm": f"{_LAYER}.post_attention_layernorm",
    "layers.*.attention.qkv_proj": f"{_LAYER}.attention.query_key_value",
    "layers.*.attention.o_proj": f"{_LAYER}.attention.dense",
    "layers.*.mlp.up_proj": f"{_LAYER}.mlp.dense_h_to_4h",
    "layers.*.mlp.down_proj": f"{_LAYER}.mlp.dense_4h_to_h",
    "norm": "gpt_neox.final_layer_norm",
}
_TABLES = {"embedding.tokens": "gpt_neox.embed_in", "lm_head": "embed_out"}
_BLOCKS = {True: "gpt_j", False: "pre_ln"}
"""``use_parallel_residual`` → ours."""


def _from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    older = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}  # in addition to rope_scaling
    rope = {key: hf_config[name] for key, name in older.items() if name in hf_config} | dict(rope_of(hf_config))
    linear = rope.get("rope_type", rope.get("type")) == "linear"
    whole = {**rope, "partial_rotary_factor": None, **({"rope_type": "default"} if linear else {})}
    longest = hf_config.get("max_position_embeddings", 2048)
    return {
        **scaling_from_hf(whole, model="gpt", max_position_embeddings=longest),
        "activation": ACTIVATIONS[hf_config.get("hidden_act") or "gelu"],
        "transformer_block_type": _BLOCKS[bool(hf_config.get("use_parallel_residual", True))],
        "position_embedding_type": "rope",
        "rotary_percentage": number_of(rope, "partial_rotary_factor", 0.25),
        "position_freq_base": number_of(rope, "rope_theta", 10_000.0),
        "positition_interpolation_factor": number_of(rope, "factor", 1.0) if linear else 1.0,
    }


def _to_hf(config: GPTArchitecture) -> dict[str, Any]:
    base = config.position_freq_base * config.position_abf_factor
    scaled = scaling_to_hf(config.scaling)
    rope = scaled.pop("rope_scaling") or {"rope_type": "default"}
    return {
        "hidden_act": activation_to_hf(config),
        "use_parallel_residual": config.transformer_block_type == "gpt_j",
        "attention_bias": True,
        "intermediate_size": config.ffn_size,
        "rotary_pct": config.rotary_percentage,
        "rotary_emb_base": base,
        **scaled,
        "rope_parameters": {**rope, "rope_theta": base, "partial_rotary_factor": config.rotary_percentage},
    }


def _key_map(heads: int) -> Sequence[KeyMap]:
    return (
        *weight_keys(_TABLES),
        *with_biases(_MODULES),
    )


def _obstacles(config: GPTArchitecture) -> Iterator[str]:
    yield from common_obstacles(config)
    if config.position_embedding_type != "rope":
        yield f"position_embedding_type {config.position_embedding_type}"
    if config.transformer_block_type not in _BLOCKS.values():
        yield f"transformer_block_type {config.transformer_block_type}"


GPT_NEOX = HFFamily(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    values=HFValues(
        model="gpt",
        required={
            "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "ffn_hidden_size": "intermediate_size",
            "num_attention_heads": "num_attention_heads",
            "vocab_size": "vocab_size",
        },
        optional={
            "max_position_embeddings": ("max_position_embeddings", 2048),
            "layernorm_epsilon": ("layer_norm_eps", 1e-5),
            "hidden_dropout": ("hidden_dropout", 0.0),
            "attention_dropout": ("attention_dropout", 0.0),
            "init_method_std": ("initializer_range", 0.02),
            "share_embeddings_and_output_weights": ("tie_word_embeddings", False),
        },
        only={
            "hidden_act": tuple(ACTIVATIONS),
            "attention_bias": (True,),
            "quantization_config": (None,),
        },
    ),
    from_hf=_from_hf,
    to_hf=_to_hf,
    key_map=_key_map,
    obstacles=_obstacles,
    ignored=(
        f"{_LAYER}.attention.bias",
        f"{_LAYER}.attention.masked_bias",
        f"{_LAYER}.attention.rotary_emb.inv_freq",
        "embed_out.weight",
    ),
)
