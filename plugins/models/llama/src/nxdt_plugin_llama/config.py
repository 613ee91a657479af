"""Section ``model`` of a Llama or Mistral. No torch here: ``nxdt config check`` reads this module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from nxdt_core.config.annotations import AliasOf, NonNegativeFloat, PositiveInt
from nxdt_plugin_llama.hf import LLAMA, MISTRAL, config_from_hf

__all__ = ["LlamaConfig", "MistralConfig", "RopeScalingConfig", "RopeType"]

RopeType = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScalingConfig:
    """Stretches the rotary embedding beyond the context that a model was first trained on."""

    rope_type: RopeType | None = None
    """``linear`` divides all frequencies, ``llama3`` the slow ones, ``default`` changes nothing."""
    type: RopeType | None = None
    """Older spelling of ``rope_type``."""
    factor: float | None = None
    """How many times longer the context becomes."""
    low_freq_factor: float | None = None
    """``llama3``: wavelengths above the original context divided by this are scaled in full."""
    high_freq_factor: float | None = None
    """``llama3``: wavelengths below the original context divided by this are kept."""
    original_max_position_embeddings: PositiveInt | None = None
    """``llama3``: the original context in tokens."""

    @property
    def kind(self) -> RopeType:
        """The type, by either spelling."""
        return self.rope_type or self.type or "default"

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work."""
        if self.rope_type is None and self.type is None:
            yield "rope_type", "is missing: default, linear or llama3"
        if self.rope_type is not None and self.type is not None and self.rope_type != self.type:
            yield "type", f"is an older spelling of rope_type, which says {self.rope_type!r}"
        needed = {
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        }
        for key in needed[self.kind]:
            value = getattr(self, key)
            if value is None:
                yield key, f"is needed by rope_type {self.kind!r}"
            elif value <= 0:
                yield key, "must be above 0"
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.kind == "llama3" and low is not None and high is not None and high <= low:
            yield "high_freq_factor", f"must be above low_freq_factor ({low:g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Architecture of a Llama; the names of the keys are NxD Training's."""

    num_layers: PositiveInt
    """Decoder layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    ffn_hidden_size: PositiveInt
    """Width of the feed-forward block (``intermediate_size`` of Hugging Face)."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads, each shared by a group of query heads; ``null``: as many as query heads."""
    head_dim: PositiveInt | None = None
    """Width of a head; ``null``: ``hidden_size / num_attention_heads``."""
    vocab_size: PositiveInt
    """Rows of the embedding; at least the tokenizer's number of ids."""
    max_position_embeddings: PositiveInt = 4096
    """Longest sequence in tokens."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingConfig | None = None
    """Scaling of the rotary frequencies; ``null``: none."""
    layernorm_epsilon: NonNegativeFloat = 1e-5
    """Added to the mean square in RMSNorm (``rms_norm_eps`` of Hugging Face)."""
    share_embeddings_and_output_weights: bool = False
    """One matrix for embedding and head (``tie_word_embeddings`` of Hugging Face)."""
    init_method_std: NonNegativeFloat = 0.02
    """Standard deviation of fresh weights (``initializer_range`` of Hugging Face)."""
    use_scaled_init_method: bool = True
    """Divide it by √(2 · ``num_layers``) for the matrices that write to the residual stream."""

    @property
    def kv_heads(self) -> int:
        """``num_kv_heads`` with its default applied."""
        return self.num_kv_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """``head_dim`` with its default applied."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def window(self) -> int | None:
        """How many tokens one sees, itself included; None for all before it."""
        return None

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of this section from a Hugging Face ``config.json`` (``model.model_config``)."""
        return config_from_hf(hf, LLAMA)

    @classmethod
    def hf_names(cls, hf: Mapping[str, Any]) -> dict[str, str]:
        """Key of this section → key of that file."""
        return LLAMA.values.names

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work together."""
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            yield "hidden_size", f"must be a multiple of num_attention_heads ({heads}), or head_dim be given"
        elif self.head_size % 2:
            yield "head_dim", f"must be even for the rotary embedding, not {self.head_size}"
        if heads % self.kv_heads:
            yield "num_kv_heads", f"must divide num_attention_heads ({heads})"
        if self.rope_theta <= 0:
            yield "rope_theta", "must be above 0"
        if self.rope_scaling is not None:
            for key, problem in self.rope_scaling.check():
                yield f"rope_scaling.{key}", problem


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Architecture of a Mistral: a Llama whose tokens see the last few only."""

    sliding_window: PositiveInt | None = 4096
    """Tokens that one sees, itself included; ``null``: all before it, as in Mistral 7B v0.2 and later."""
    sliding_window_size: Annotated[PositiveInt | None, AliasOf("model.sliding_window")] = None
    """``sliding_window``, as Megatron models of NxD Training call it."""
    max_position_embeddings: PositiveInt = 32768
    """Longest sequence in tokens."""

    @property
    def window(self) -> int | None:
        """``sliding_window``."""
        return self.sliding_window

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of this section from a Hugging Face ``config.json`` (``model.model_config``)."""
        return config_from_hf(hf, MISTRAL)

    @classmethod
    def hf_names(cls, hf: Mapping[str, Any]) -> dict[str, str]:
        """Key of this section → key of that file."""
        return MISTRAL.values.names
