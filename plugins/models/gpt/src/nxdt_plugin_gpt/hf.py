"""Families of Hugging Face that a GPT may be, GPT-2 and GPT-NeoX: keys of their files and names of tensors. No torch.

Projections of ``GPT2LMHeadModel`` are stored [in, out], and that of attention has all queries first. The fused
projection of ``GPTNeoXForCausalLM``, which Pythia is too, has our order: query, key and value by head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nxdt_core.errors.models import HFUnsupported
from nxdt_core.models.huggingface import HFValues, score_head_from_hf
from nxdt_core.models.rope_scaling import number_of, rope_of, scaling_from_hf

ACTIVATIONS: Mapping[str, str] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}
"""Theirs → ours; of several names for one the first is written."""


_GPT2_LAYER = "transformer.h.*"
_BLOCKS = {True: "gpt_j", False: "pre_ln"}
"""``use_parallel_residual`` → ours."""
_NEOX_LAYER = "gpt_neox.layers.*"


@dataclass(frozen=True, slots=True, kw_only=True)
class HFFamily:
    """Configuration and parameters of one architecture, there and here."""

    architecture: str
    model_type: str
    positions: str
    """Its ``position_embedding_type``."""
    block_types: tuple[str, ...]
    """Each ``transformer_block_type`` that it has."""
    activation: tuple[str, str]
    """Key of ``config.json`` that names the activation, and the name where a file lacks it."""
    values: HFValues
    """Keys of ``config.json`` that need no translation of their values."""
    from_hf: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Returns further keys of ours."""
    tables: Mapping[str, str]
    """Modules with a weight alone: ours → theirs."""
    modules: Mapping[str, tuple[str, str]]
    """Modules with a weight and a bias: ours → theirs, and the transform of the weight."""
    ignored: tuple[str, ...]


def _gpt2_from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    embedding = hf_config.get("embd_pdrop", 0.1)
    residual = hf_config.get("resid_pdrop", 0.1)
    if embedding != residual:
        raise HFUnsupported(model="gpt", key="embd_pdrop", found=embedding, supported=f"resid_pdrop, {residual}")
    return {"hidden_dropout": residual}


GPT2 = HFFamily(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    positions="learned_absolute",
    block_types=("pre_ln",),
    activation=("activation_function", "gelu_new"),
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
    from_hf=_gpt2_from_hf,
    tables={"embedding.tokens": "transformer.wte", "embedding.positions": "transformer.wpe", "lm_head": "lm_head"},
    modules={
        "layers.*.attention_norm": (f"{_GPT2_LAYER}.ln_1", "none"),
        "layers.*.mlp_norm": (f"{_GPT2_LAYER}.ln_2", "none"),
        "norm": ("transformer.ln_f", "none"),
        "layers.*.attention.o_proj": (f"{_GPT2_LAYER}.attn.c_proj", "transpose"),
        "layers.*.mlp.up_proj": (f"{_GPT2_LAYER}.mlp.c_fc", "transpose"),
        "layers.*.mlp.down_proj": (f"{_GPT2_LAYER}.mlp.c_proj", "transpose"),
        "layers.*.attention.qkv_proj": (f"{_GPT2_LAYER}.attn.c_attn", "interleave_transpose"),
    },
    ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias", "lm_head.weight"),
)


def _neox_from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    older = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}  # in addition to rope_scaling
    rope = {key: hf_config[name] for key, name in older.items() if name in hf_config} | dict(rope_of(hf_config))
    linear = rope.get("rope_type", rope.get("type")) == "linear"
    whole = {**rope, "partial_rotary_factor": None, **({"rope_type": "default"} if linear else {})}
    longest = hf_config.get("max_position_embeddings", 2048)
    return {
        **scaling_from_hf(whole, model="gpt", max_position_embeddings=longest),
        "transformer_block_type": _BLOCKS[bool(hf_config.get("use_parallel_residual", True))],
        "rotary_percentage": number_of(rope, "partial_rotary_factor", 0.25),
        "position_freq_base": number_of(rope, "rope_theta", 10_000.0),
        "positition_interpolation_factor": number_of(rope, "factor", 1.0) if linear else 1.0,
    }


GPT_NEOX = HFFamily(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    positions="rope",
    block_types=tuple(_BLOCKS.values()),
    activation=("hidden_act", "gelu"),
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
    from_hf=_neox_from_hf,
    tables={"embedding.tokens": "gpt_neox.embed_in", "lm_head": "embed_out"},
    modules={
        "layers.*.attention_norm": (f"{_NEOX_LAYER}.input_layernorm", "none"),
        "layers.*.mlp_norm": (f"{_NEOX_LAYER}.post_attention_layernorm", "none"),
        "layers.*.attention.qkv_proj": (f"{_NEOX_LAYER}.attention.query_key_value", "none"),
        "layers.*.attention.o_proj": (f"{_NEOX_LAYER}.attention.dense", "none"),
        "layers.*.mlp.up_proj": (f"{_NEOX_LAYER}.mlp.dense_h_to_4h", "none"),
        "layers.*.mlp.down_proj": (f"{_NEOX_LAYER}.mlp.dense_4h_to_h", "none"),
        "norm": ("gpt_neox.final_layer_norm", "none"),
    },
    ignored=(
        f"{_NEOX_LAYER}.attention.bias",
        f"{_NEOX_LAYER}.attention.masked_bias",
        f"{_NEOX_LAYER}.attention.rotary_emb.inv_freq",
        "embed_out.weight",
    ),
)

FAMILIES = (GPT2, GPT_NEOX)

IGNORED = tuple(name for family in FAMILIES for name in family.ignored)
"""Tensors that a directory may hold and no parameter needs: masks and rotary tables of old exports, and the head next
to a tied embedding (with an untied one the key map takes it)."""


def family_of(hf_config: Mapping[str, Any]) -> HFFamily:
    """Return the family of a ``config.json``.

    Raises:
        HFUnsupported: the model is of another one.
    """
    kind = hf_config.get("model_type")
    for family in FAMILIES:
        if family.model_type == kind:
            return family
    supported = " and ".join(repr(family.model_type) for family in FAMILIES)
    raise HFUnsupported(model="gpt", key="model_type", found=kind, supported=supported)


def config_from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the section from those of a ``config.json``, written by transformers 4 or 5.

    Raises:
        HFUnsupported: the model is of another family or has a feature that is not implemented.
        HFFileDamaged: a size is missing.
    """
    family = family_of(hf_config)
    ours, (key, default) = family.values.read(hf_config), family.activation
    ours |= {
        "make_vocab_size_divisible_by": 1,
        "use_scaled_init_method": False,
        "activation": ACTIVATIONS[hf_config.get(key) or default],
        "position_embedding_type": family.positions,
    }
    return ours | dict(family.from_hf(hf_config)) | score_head_from_hf(hf_config, model="gpt")
