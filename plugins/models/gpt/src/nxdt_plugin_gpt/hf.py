"""Exchange with Hugging Face: its families GPT-2 and GPT-NeoX, and which of them a configuration is. No torch here.

Projections of ``GPT2LMHeadModel`` are stored [in, out], and that of attention has all queries first. The fused
projection of ``GPTNeoXForCausalLM``, which Pythia is too, has our order: query, key and value by head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nxdt_core.errors.models import HFUnsupported
from nxdt_core.models.huggingface import SCORE, HFValues, architecture_to_hf, score_head_from_hf, weight_keys
from nxdt_core.models.rope_scaling import number_of, rope_of, scaling_from_hf, scaling_to_hf
from nxdt_core.protocols.model import KeyMap
from nxdt_plugin_gpt.errors import NoHuggingFaceForm

if TYPE_CHECKING:
    from nxdt_plugin_gpt.config import GPTConfig

_ACTIVATIONS: Mapping[str, str] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}
"""Theirs → ours; of several names for one the first is written."""


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
    to_hf: Callable[[GPTConfig], Mapping[str, Any]]
    """Returns further keys of theirs."""
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


def _gpt2_to_hf(config: GPTConfig) -> dict[str, Any]:
    return {"embd_pdrop": config.hidden_dropout, "resid_pdrop": config.hidden_dropout, "n_inner": config.ffn_size}


_GPT2_LAYER = "transformer.h.*"
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
            "activation_function": tuple(_ACTIVATIONS),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "quantization_config": (None,),
        },
    ),
    from_hf=_gpt2_from_hf,
    to_hf=_gpt2_to_hf,
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


_BLOCKS = {True: "gpt_j", False: "pre_ln"}
"""``use_parallel_residual`` → ours."""


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


def _neox_to_hf(config: GPTConfig) -> dict[str, Any]:
    base = config.position_freq_base * config.position_abf_factor
    scaled = scaling_to_hf(config.scaling)
    rope = scaled.pop("rope_scaling") or {"rope_type": "default"}
    return {
        "use_parallel_residual": config.transformer_block_type == "gpt_j",
        "attention_bias": True,
        "intermediate_size": config.ffn_size,
        "rotary_pct": config.rotary_percentage,
        "rotary_emb_base": base,
        **scaled,
        "rope_parameters": {**rope, "rope_theta": base, "partial_rotary_factor": config.rotary_percentage},
    }


_NEOX_LAYER = "gpt_neox.layers.*"
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
            "hidden_act": tuple(_ACTIVATIONS),
            "attention_bias": (True,),
            "quantization_config": (None,),
        },
    ),
    from_hf=_neox_from_hf,
    to_hf=_neox_to_hf,
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
    known = " and ".join(repr(family.model_type) for family in FAMILIES)
    raise HFUnsupported(model="gpt", key="model_type", found=kind, supported=known)


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
        "activation": _ACTIVATIONS[hf_config.get(key) or default],
        "position_embedding_type": family.positions,
    }
    return ours | dict(family.from_hf(hf_config)) | score_head_from_hf(hf_config, model="gpt")


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Return the ``config.json``, with keys that both transformers 4 and 5 read. Dropout behind the activation, which
    only training knows, has no place in it, nor have the rows that fill the vocabulary up.

    Raises:
        NoHuggingFaceForm: no family computes what this configuration does.
    """
    family = _fitting_family(config)
    return {
        **architecture_to_hf(family.architecture, scores=config.score_head),
        "model_type": family.model_type,
        **family.values.write(config),
        family.activation[0]: next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == config.activation),
        **family.to_hf(config),
    }


def key_map(config: GPTConfig) -> tuple[KeyMap, ...]:
    """Return one entry per parameter, except a tied head. Rows that pad the vocabulary are not exchanged.

    Raises:
        NoHuggingFaceForm: no family has these parameters.
    """
    family, entries = _fitting_family(config), [SCORE] if config.score_head else []
    for entry in weight_keys(family.tables):
        if entry.name == "lm_head.weight" and (config.tied or config.score_head):
            continue
        padded = config.vocab_rows != config.vocab_size and entry.name != "embedding.positions.weight"
        entries.append(replace(entry, transform="pad", sections=(config.vocab_size,)) if padded else entry)
    for ours, (theirs, transform) in family.modules.items():
        by_kind = transform.startswith("interleave")
        sections = (3, config.num_attention_heads) if by_kind else ()
        for leaf, form in (("weight", transform), ("bias", "interleave" if by_kind else "none")):
            name, names = f"{ours}.{leaf}", (f"{theirs}.{leaf}",)
            entries.append(KeyMap(name=name, hf_names=names, transform=form, sections=sections))
    return tuple(entries)


def _fitting_family(config: GPTConfig) -> HFFamily:
    """Return the family that computes what ``config`` says.

    Raises:
        NoHuggingFaceForm: there is none.
    """
    obstacles = {family.architecture: list(_obstacles(config, family)) for family in FAMILIES}
    for family in FAMILIES:
        if not obstacles[family.architecture]:
            return family
    raise NoHuggingFaceForm(obstacles=obstacles)


def _obstacles(config: GPTConfig, family: HFFamily) -> Iterator[str]:
    """Yield what ``config`` computes and ``family`` does not."""
    if config.normalization != "layernorm":
        yield f"normalization {config.normalization}"
    if config.activation not in _ACTIVATIONS.values():
        yield f"activation {config.activation}"
    if not config.has_bias:
        yield "has_bias false"
    if not config.fused_qkv:
        yield "fewer key than query heads"
    if config.head_size * config.num_attention_heads != config.hidden_size:
        yield "kv_channels other than hidden_size / num_attention_heads"
    if config.position_embedding_type != family.positions:
        yield f"position_embedding_type {config.position_embedding_type}"
    if config.transformer_block_type not in family.block_types:
        yield f"transformer_block_type {config.transformer_block_type}"
