"""Conversion of a rotary decoder from and to a Hugging Face model: its ``config.json`` and its tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from nxdt_core.config.huggingface import architectures_of
from nxdt_core.errors.models import HFFileDamaged, HFUnsupported
from nxdt_core.models.rope_scaling import number_of, rope_of, scaling_from_hf
from nxdt_core.protocols.model import KeyMap

REQUIRED: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
"""Sizes that a ``config.json`` must give: ours → theirs."""
WITHOUT_EFFECT = ("neftune_noise_alpha", "use_scaled_init_method")
"""Keys of a decoder's section that what it computes after training does not depend on."""
OPTIONAL: Mapping[str, tuple[str, Any]] = {
    "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "max_position_embeddings": ("max_position_embeddings", 2048),
    "layernorm_epsilon": ("rms_norm_eps", 1e-6),
    "share_embeddings_and_output_weights": ("tie_word_embeddings", False),
    "init_method_std": ("initializer_range", 0.02),
}
"""Ours → theirs, with the defaults of transformers' ``LlamaConfig``."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0,),
    "quantization_config": (None,),
}
"""Keys of their configuration → the values of them that are implemented."""
IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq", "lm_head.weight")
"""Tensors that a directory may contain and that no parameter takes: rotary tables of old exports, and the head next to
a tied embedding. The key map of an untied model takes the head."""
DECODER_MODULES: Mapping[str, str] = {
    "embed_tokens": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.q_proj": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.k_proj": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.v_proj": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    "layers.*.attention.o_proj": "model.layers.*.self_attn.o_proj",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
"""Modules of a :class:`~nxdt_core.models.decoder.RotaryDecoder`: ours → theirs. The feed-forward blocks are missing."""
SWIGLU_MODULES: Mapping[str, str] = {
    "layers.*.mlp.gate_proj": "model.layers.*.mlp.gate_proj",
    "layers.*.mlp.up_proj": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.down_proj": "model.layers.*.mlp.down_proj",
}
"""Modules of dense SwiGLU blocks: ours → theirs."""
SCORE = KeyMap(name="score.weight", hf_names=("score.weight",))
"""The head of a sequence classifier of transformers."""
_CLASSIFIER = "ForSequenceClassification"
_TAG = "__float__"
_VALUES = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


@dataclass(frozen=True, slots=True, kw_only=True)
class HFValues:
    """Which of our keys correspond to which of theirs; ours are dotted where they are in a section of the model's."""

    model: str
    """For messages."""
    required: Mapping[str, str]
    """Ours → theirs, where a file must have the key."""
    optional: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Ours → theirs, and what transformers takes where a file lacks the key."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Theirs → the values that are implemented, of features without a key of ours; the first is named in the error."""

    @property
    def names(self) -> dict[str, str]:
        """Return the key of the file for each key of ours."""
        return dict(self.required) | {ours: theirs for ours, (theirs, _) in self.optional.items()}

    def read(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of our keys from those of a ``config.json``.

        Raises:
            HFUnsupported: the model has a feature that is not implemented.
            HFFileDamaged: a required key is missing.
        """
        for key, allowed in self.only.items():
            if hf_config.get(key) not in (*allowed, None):
                raise HFUnsupported(model=self.model, key=key, found=hf_config[key], supported=repr(allowed[0]))
        missing = [theirs for theirs in self.required.values() if theirs not in hf_config]
        if missing:
            raise HFFileDamaged(path="config.json", reason=f"it has no {', '.join(missing)}")
        ours = {key: hf_config[theirs] for key, theirs in self.required.items()}
        return ours | {key: hf_config.get(theirs, default) for key, (theirs, default) in self.optional.items()}

    def write(self, config: object) -> dict[str, Any]:
        """Their keys from the section, and the first implemented value of each feature."""
        features = {key: allowed[0] for key, allowed in self.only.items() if allowed[0] is not None}
        return features | {theirs: attrgetter(ours)(config) for ours, theirs in self.names.items()}


def architecture_to_hf(causal_lm: str, *, scores: bool) -> dict[str, Any]:
    """Return the keys of a ``config.json`` that name the class of a model: ``causal_lm``, or with ``scores`` the
    classifier of that family with one label."""
    if not scores:
        return {"architectures": [causal_lm]}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [re.sub("ForCausalLM$|LMHeadModel$", _CLASSIFIER, causal_lm)], **labels}


def score_head_from_hf(hf_config: Mapping[str, Any], *, model: str) -> dict[str, bool]:
    """Return the key ``score_head`` where a ``config.json`` is that of a sequence classifier.

    Raises:
        HFUnsupported: it has several labels.
    """
    if not any(name.endswith(_CLASSIFIER) for name in architectures_of(hf_config)):
        return {}
    labels = hf_config.get("id2label") or {"0": "", "1": ""}  # transformers writes them unless there are two
    if len(labels) != 1:
        raise HFUnsupported(model=model, key="id2label", found=f"{len(labels)} labels", supported="one label")
    return {"score_head": True}


def weight_keys(modules: Mapping[str, str]) -> tuple[KeyMap, ...]:
    """Return one entry for the ``weight`` of each module; ``modules`` maps our names to theirs."""
    return tuple(KeyMap(name=f"{ours}.weight", hf_names=(f"{theirs}.weight",)) for ours, theirs in modules.items())


def bias_key(weight: KeyMap) -> KeyMap:
    """Return the entry of the bias next to the weight of a linear layer."""
    name, *theirs = (f"{weight_name.removesuffix('.weight')}.bias" for weight_name in (weight.name, *weight.hf_names))
    return KeyMap(name=name, hf_names=tuple(theirs))


@dataclass(frozen=True, slots=True, kw_only=True)
class HFFamily:
    """A rotary decoder of transformers: the keys of its ``config.json`` and the names of its tensors."""

    values: HFValues
    """Keys of ``config.json`` other than the rotary embedding's; ``values.model`` is its ``model_type``."""
    keys: tuple[KeyMap, ...]
    """Key maps of all weights; those that a model lacks are left out, and its biases follow."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies where the file gives none."""
    always: tuple[str, ...] = ()
    """Keys of ours that are true in all its models. Keys that neither they nor ``values`` name have the default of the
    class that declares them, or the model has no form in Hugging Face's library."""
    converted: tuple[str, ...] = ()
    """Keys of ours that ``from_hf`` of the section and ``config_to_hf`` of the builder convert, since no key of theirs
    has the same value."""
    without_effect: tuple[str, ...] = WITHOUT_EFFECT
    """Keys of ours, dotted within sections, that what the model computes after training does not depend on."""

    def read(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of the model's section from a ``config.json`` that transformers 4 or 5 wrote.

        Raises:
            HFUnsupported: the model has a feature that is not implemented.
            HFFileDamaged: a size is missing, or a value is of a wrong type.
        """
        ours = self.values.read(hf_config)
        kinds = set(hf_config.get("layer_types") or ())
        if len(kinds) > 1:
            raise HFUnsupported(
                model=self.values.model, key="layer_types", found=sorted(kinds), supported="one kind for all layers"
            )
        older = {key: hf_config[key] for key in ("rope_theta", "partial_rotary_factor") if key in hf_config}
        # Next to the mapping, as in Phi-3's files, it overrides the one inside.
        outside = {key: hf_config[key] for key in ("original_max_position_embeddings",) if key in hf_config}
        rope = older | dict(rope_of(hf_config)) | outside
        ours["rope_theta"] = number_of(rope, "rope_theta", self.rope_theta)
        longest = ours["max_position_embeddings"]
        ours |= scaling_from_hf(rope, model=self.values.model, max_position_embeddings=longest)
        ours |= {**dict.fromkeys(self.always, True), "use_scaled_init_method": False}
        return ours | score_head_from_hf(hf_config, model=self.values.model)


def read_floats(value: Any) -> Any:
    """Return ``value`` with the floats that its spellings mean, at any depth."""
    if isinstance(value, Mapping):
        spelled = value.get(_TAG) if len(value) == 1 else None
        if isinstance(spelled, str) and spelled in _VALUES:
            return _VALUES[spelled]
        return {key: read_floats(item) for key, item in value.items()}
    return [read_floats(item) for item in value] if isinstance(value, (list, tuple)) else value


def spell_floats(value: Any) -> Any:
    """Return ``value`` with a spelling for each float that JSON lacks, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, Mapping):
        return {key: spell_floats(item) for key, item in value.items()}
    return [spell_floats(item) for item in value] if isinstance(value, (list, tuple)) else value
