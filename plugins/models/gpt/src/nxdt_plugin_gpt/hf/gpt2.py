"""``GPT2LMHeadModel``. Its projections are stored [in, out], and that of attention has all queries first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nxdt_core.errors.models import HFUnsupported
from nxdt_core.models.huggingface import HFValues, weight_keys
from nxdt_core.protocols.model import KeyMap
from nxdt_plugin_gpt.architecture import GPTArchitecture
from nxdt_plugin_gpt.hf.family import ACTIVATIONS, HFFamily, activation_to_hf, common_obstacles, with_biases

_LAYER = "transformer.h.*"
_NORMS = {
    "layers.*.attention_norm": f"{_LAYER}.ln_1",
    "layers.*.mlp_norm": f"{_LAYER}.ln_2",
    "norm": "transformer.ln_f",
}
_PROJECTIONS = {
    "layers.*.attention.o_proj": f"{_LAYER}.attn.c_proj",
    "layers.*.mlp.up_proj": f"{_LAYER}.mlp.c_fc",
    "layers.*.mlp.down_proj": f"{_LAYER}.mlp.c_proj",
}
_TABLES = {
    "embedding.tokens": "transformer.wte",
    "embedding.positions": "transformer.wpe",
    "lm_head": "lm_head",
}
_QKV, _THEIR_QKV = "layers.*.attention.qkv_proj", f"{_LAYER}.attn.c_attn"


def _from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    embedding = hf_config.get("embd_pdrop", 0.1)
    residual = hf_config.get("resid_pdrop", 0.1)
    if embedding != residual:
        raise HFUnsupported(model="gpt", key="embd_pdrop", found=embedding, supported=f"resid_pdrop, {residual}")
    return {
        "activation": ACTIVATIONS[hf_config.get("activation_function") or "gelu_new"],
        "hidden_dropout": residual,
        "position_embedding_type": "learned_absolute",
    }


def _to_hf(config: GPTArchitecture) -> dict[str, Any]:
    return {
        "activation_function": activation_to_hf(config),
        "embd_pdrop": config.hidden_dropout,
        "resid_pdrop": config.hidden_dropout,
        "n_inner": config.ffn_size,
    }


def _key_map(heads: int) -> Sequence[KeyMap]:
    kinds = (3, heads)
    return (
        *weight_keys(_TABLES),
        *with_biases(_NORMS),
        *with_biases(_PROJECTIONS, "transpose"),
        KeyMap(
            name=f"{_QKV}.weight",
            hf_names=(f"{_THEIR_QKV}.weight",),
            transform="interleave_transpose",
            sections=kinds,
        ),
        KeyMap(name=f"{_QKV}.bias", hf_names=(f"{_THEIR_QKV}.bias",), transform="interleave", sections=kinds),
    )


def _obstacles(config: GPTArchitecture) -> Iterator[str]:
    yield from common_obstacles(config)
    if config.position_embedding_type != "learned_absolute":
        yield f"position_embedding_type {config.position_embedding_type}"
    if config.transformer_block_type != "pre_ln":
        yield f"transformer_block_type {config.transformer_block_type}"


GPT2 = HFFamily(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    values=HFValues(
        model="gpt",
        required={
            "num_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "vocab_size": "vocab_size",
        },
        optional={
            "ffn_hidden_size": ("n_inner", None),
            "max_position_embeddings": ("n_positions", 1024),
            "layernorm_epsilon": ("layer_norm_epsilon", 1e-5),
            "attention_dropout": ("attn_pdrop", 0.1),
            "init_method_std": ("initializer_range", 0.02),
            "share_embeddings_and_output_weights": ("tie_word_embeddings", True),
        },
        only={
            "activation_function": tuple(ACTIVATIONS),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "quantization_config": (None,),
        },
    ),
    from_hf=_from_hf,
    to_hf=_to_hf,
    key_map=_key_map,
    obstacles=_obstacles,
    ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias", "lm_head.weight"),
)
