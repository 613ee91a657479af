"""Exchange with Hugging Face: its families GPT-2 and GPT-NeoX, which a configuration is, and what they share.

Projections of ``GPT2LMHeadModel`` are stored [in, out], and that of attention has all queries first. The fused
projection of ``GPTNeoXForCausalLM``, which Pythia is too, has our order: query, key and value by head. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nxdt_core.errors.models import HFUnsupported
from nxdt_core.models.huggingface import HFValues, architecture_to_hf, score_head_from_hf, weight_keys
from nxdt_core.models.rope_scaling import number_of, rope_of, scaling_from_hf, scaling_to_hf
from nxdt_core.protocols.model import KeyMap
from nxdt_plugin_gpt.architecture import GPTArchitecture
from nxdt_plugin_gpt.errors import NoHuggingFaceForm

ACTIVATIONS: Mapping[str, str] = {
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
    values: HFValues
    """Keys of ``config.json`` that need no translation of their values."""
    from_hf: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Returns further keys of ours."""
    to_hf: Callable[[GPTArchitecture], Mapping[str, Any]]
    """Returns further keys of theirs."""
    key_map: Callable[[int], Sequence[KeyMap]]
    """Returns all parameters of a model with so many heads."""
    obstacles: Callable[[GPTArchitecture], Iterator[str]]
    """Yields reasons why the architecture does not compute what a configuration says; nothing where it does."""
    ignored: tuple[str, ...]


def activation_to_hf(config: GPTArchitecture) -> str:
    """Return their name of the activation."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)


def common_obstacles(config: GPTArchitecture) -> Iterator[str]:
    """Yield what neither family has."""
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


def with_biases(modules: Mapping[str, str], transform: str = "none") -> Iterator[KeyMap]:
    """Weight and bias of each module, ours → theirs; ``transform`` is of the weight."""
    for ours, theirs in modules.items():
        yield KeyMap(name=f"{ours}.weight", hf_names=(f"{theirs}.weight",), transform=transform)
        yield KeyMap(name=f"{ours}.bias", hf_names=(f"{theirs}.bias",))


_GPT2_LAYER = "transformer.h.*"
_GPT2_NORMS = {
    "layers.*.attention_norm": f"{_GPT2_LAYER}.ln_1",
    "layers.*.mlp_norm": f"{_GPT2_LAYER}.ln_2",
    "norm": "transformer.ln_f",
}
_GPT2_PROJECTIONS = {
    "layers.*.attention.o_proj": f"{_GPT2_LAYER}.attn.c_proj",
    "layers.*.mlp.up_proj": f"{_GPT2_LAYER}.mlp.c_fc",
    "layers.*.mlp.down_proj": f"{_GPT2_LAYER}.mlp.c_proj",
}
_GPT2_TABLES = {
    "embedding.tokens": "transformer.wte",
    "embedding.positions": "transformer.wpe",
    "lm_head": "lm_head",
}
_QKV, _THEIR_QKV = "layers.*.attention.qkv_proj", f"{_GPT2_LAYER}.attn.c_attn"


def _gpt2_from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    embedding = hf_config.get("embd_pdrop", 0.1)
    residual = hf_config.get("resid_pdrop", 0.1)
    if embedding != residual:
        raise HFUnsupported(model="gpt", key="embd_pdrop", found=embedding, supported=f"resid_pdrop, {residual}")
    return {
        "activation": ACTIVATIONS[hf_config.get("activation_function") or "gelu_new"],
        "hidden_dropout": residual,
        "position_embedding_type": "learned_absolute",
    }


def _gpt2_to_hf(config: GPTArchitecture) -> dict[str, Any]:
    return {
        "activation_function": activation_to_hf(config),
        "embd_pdrop": config.hidden_dropout,
        "resid_pdrop": config.hidden_dropout,
        "n_inner": config.ffn_size,
    }


def _gpt2_key_map(heads: int) -> Sequence[KeyMap]:
    kinds = (3, heads)
    return (
        *weight_keys(_GPT2_TABLES),
        *with_biases(_GPT2_NORMS),
        *with_biases(_GPT2_PROJECTIONS, "transpose"),
        KeyMap(
            name=f"{_QKV}.weight",
            hf_names=(f"{_THEIR_QKV}.weight",),
            transform="interleave_transpose",
            sections=kinds,
        ),
        KeyMap(name=f"{_QKV}.bias", hf_names=(f"{_THEIR_QKV}.bias",), transform="interleave", sections=kinds),
    )


def _gpt2_obstacles(config: GPTArchitecture) -> Iterator[str]:
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
    from_hf=_gpt2_from_hf,
    to_hf=_gpt2_to_hf,
    key_map=_gpt2_key_map,
    obstacles=_gpt2_obstacles,
    ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias", "lm_head.weight"),
)


_NEOX_LAYER = "gpt_neox.layers.*"
_NEOX_MODULES = {
    "layers.*.attention_norm": f"{_NEOX_LAYER}.input_layernorm",
    "layers.*.mlp_norm": f"{_NEOX_LAYER}.post_attention_layernorm",
    "layers.*.attention.qkv_proj": f"{_NEOX_LAYER}.attention.query_key_value",
    "layers.*.attention.o_proj": f"{_NEOX_LAYER}.attention.dense",
    "layers.*.mlp.up_proj": f"{_NEOX_LAYER}.mlp.dense_h_to_4h",
    "layers.*.mlp.down_proj": f"{_NEOX_LAYER}.mlp.dense_4h_to_h",
    "norm": "gpt_neox.final_layer_norm",
}
_NEOX_TABLES = {"embedding.tokens": "gpt_neox.embed_in", "lm_head": "embed_out"}
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
        "activation": ACTIVATIONS[hf_config.get("hidden_act") or "gelu"],
        "transformer_block_type": _BLOCKS[bool(hf_config.get("use_parallel_residual", True))],
        "position_embedding_type": "rope",
        "rotary_percentage": number_of(rope, "partial_rotary_factor", 0.25),
        "position_freq_base": number_of(rope, "rope_theta", 10_000.0),
        "positition_interpolation_factor": number_of(rope, "factor", 1.0) if linear else 1.0,
    }


def _neox_to_hf(config: GPTArchitecture) -> dict[str, Any]:
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


def _neox_key_map(heads: int) -> Sequence[KeyMap]:
    return (
        *weight_keys(_NEOX_TABLES),
        *with_biases(_NEOX_MODULES),
    )


def _neox_obstacles(config: GPTArchitecture) -> Iterator[str]:
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
    from_hf=_neox_from_hf,
    to_hf=_neox_to_hf,
    key_map=_neox_key_map,
    obstacles=_neox_obstacles,
    ignored=(
        f"{_NEOX_LAYER}.attention.bias",
        f"{_NEOX_LAYER}.attention.masked_bias",
        f"{_NEOX_LAYER}.attention.rotary_emb.inv_freq",
        "embed_out.weight",
    ),
)


FAMILIES: Mapping[str, HFFamily] = {family.architecture: family for family in (GPT2, GPT_NEOX)}
"""Families by architecture."""

IGNORED = tuple(name for family in FAMILIES.values() for name in family.ignored)
"""Tensors that a directory may hold and no parameter needs: masks and rotary tables of old exports, and the head next
to a tied embedding (with an untied one the key map takes it)."""


_VOCABULARY = ("embedding.tokens.weight", "lm_head.weight")


def config_from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of :class:`GPTArchitecture` from those of a ``config.json``, written by transformers 4 or 5.

    Raises:
        HFUnsupported: the model is of another family or has a feature that is not implemented.
        HFFileDamaged: a size is missing.
    """
    kind = hf_config.get("model_type")
    family = next((family for family in FAMILIES.values() if family.model_type == kind), None)
    if family is None:
        known = " and ".join(repr(family.model_type) for family in FAMILIES.values())
        raise HFUnsupported(model="gpt", key="model_type", found=kind, supported=known)
    ours = family.values.read(hf_config)
    ours |= {"make_vocab_size_divisible_by": 1, "use_scaled_init_method": False}
    return ours | dict(family.from_hf(hf_config)) | score_head_from_hf(hf_config, model="gpt")


def names_in_hf(hf_config: Mapping[str, Any]) -> dict[str, str]:
    """Ours → theirs, of a file that :func:`config_from_hf` has read."""
    family = next(family for family in FAMILIES.values() if family.model_type == hf_config["model_type"])
    return family.values.names


def config_to_hf(config: GPTArchitecture) -> dict[str, Any]:
    """Return the ``config.json``, with keys that both transformers 4 and 5 read. Dropout behind the activation, which
    only training knows, has no place in it, nor have the rows that fill the vocabulary up.

    Raises:
        NoHuggingFaceForm: no family computes what this configuration does.
    """
    family = _family_of(config)
    return {
        **architecture_to_hf(family.architecture, scores=config.score_head),
        "model_type": family.model_type,
        **family.values.write(config),
        **family.to_hf(config),
    }


def key_map(config: GPTArchitecture) -> tuple[KeyMap, ...]:
    """Return one entry per parameter, except a tied head. Rows that pad the vocabulary are not exchanged.

    Raises:
        NoHuggingFaceForm: no family has these parameters.
    """
    entries = [*weight_keys({"score": "score"})] if config.score_head else []
    for entry in _family_of(config).key_map(config.num_attention_heads):
        if entry.name != "lm_head.weight" or not (config.tied or config.score_head):
            entries.append(entry)
    if config.vocab_rows == config.vocab_size:
        return tuple(entries)
    return tuple(
        replace(entry, transform="pad", sections=(config.vocab_size,)) if entry.name in _VOCABULARY else entry
        for entry in entries
    )


def _family_of(config: GPTArchitecture) -> HFFamily:
    obstacles = {family.architecture: list(family.obstacles(config)) for family in FAMILIES.values()}
    for architecture, found in obstacles.items():
        if not found:
            return FAMILIES[architecture]
    raise NoHuggingFaceForm(obstacles=obstacles)
