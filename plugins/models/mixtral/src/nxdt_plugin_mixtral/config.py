"""Section ``model`` of a Mixtral. No torch here: ``nxdt config check`` reads this module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from nxdt_core.config.annotations import AliasOf, NonNegativeFloat, PositiveInt
from nxdt_plugin_mixtral.hf import VALUES, config_from_hf
from nxdt_plugin_mixtral.moe import MoEConfig

__all__ = ["MixtralConfig", "MoEConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig:
    """Architecture of a Mixtral; the names of the keys are NxD Training's."""

    num_layers: PositiveInt
    """Decoder layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    ffn_hidden_size: PositiveInt
    """Width of an expert (``intermediate_size`` of Hugging Face)."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads, each shared by a group of query heads; ``null``: as many as query heads."""
    head_dim: PositiveInt | None = None
    """Width of a head; ``null``: ``hidden_size / num_attention_heads``."""
    vocab_size: PositiveInt
    """Rows of the embedding; at least the tokenizer's number of ids."""
    max_position_embeddings: PositiveInt = 32768
    """Longest sequence in tokens."""
    sliding_window: PositiveInt | None = None
    """Tokens that one sees, itself included; ``null``: all before it, as in the released models."""
    sliding_window_size: Annotated[PositiveInt | None, AliasOf("model.sliding_window")] = None
    """``sliding_window``, as Megatron models of NxD Training call it."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary frequencies."""
    layernorm_epsilon: NonNegativeFloat = 1e-5
    """Added to the mean square in RMSNorm (``rms_norm_eps`` of Hugging Face)."""
    share_embeddings_and_output_weights: bool = False
    """One matrix for embedding and head (``tie_word_embeddings`` of Hugging Face)."""
    init_method_std: NonNegativeFloat = 0.02
    """Standard deviation of fresh weights (``initializer_range`` of Hugging Face)."""
    use_scaled_init_method: bool = True
    """Divide it by √(2 · ``num_layers``) for the matrices that write to the residual stream."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """The mixture of experts."""

    @property
    def kv_heads(self) -> int:
        """``num_kv_heads`` with its default applied."""
        return self.num_kv_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """``head_dim`` with its default applied."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def expert_layers(self) -> frozenset[int]:
        """Numbers of the layers that have experts."""
        return frozenset(n for n in range(self.num_layers) if (n + 1) % self.moe.frequency == 0)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of this section from a Hugging Face ``config.json`` (``model.model_config``)."""
        return config_from_hf(hf)

    @classmethod
    def hf_names(cls, hf: Mapping[str, Any]) -> dict[str, str]:
        """Key of this section, dotted below ``moe``, → key of that file."""
        return VALUES.names

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
        for key, problem in self.moe.check():
            yield f"moe.{key}", problem
        if self.moe.frequency > self.num_layers:
            yield "moe.frequency", f"leaves none of {self.num_layers} layers with experts"
