"""Section ``model`` of a GPT. No torch here: ``nxdt config check`` reads this module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from nxdt_core.config.section import Fraction, NonNegativeFloat, PositiveInt, Section
from nxdt_core.models.rope_scaling import RopeScalingConfig
from nxdt_plugin_gpt.hf import config_from_hf, family_of

Normalization = Literal["layernorm", "layernorm1p", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "geglu", "reglu", "swiglu"]
BlockType = Literal["pre_ln", "post_ln", "normformer", "gpt_j"]


class GPTConfig(Section):
    """Architecture of a GPT; the names of the keys are those of NxD Training's Megatron models."""

    num_layers: PositiveInt
    """Decoder layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    ffn_hidden_size: PositiveInt | None = None
    """Width of the feed-forward block; ``null``: 4 · ``hidden_size``."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads, each shared by a group of query heads; ``null``: as many as query heads."""
    kv_channels: PositiveInt | None = None
    """Width of a head; ``null``: ``hidden_size / num_attention_heads``."""
    vocab_size: PositiveInt = 50257
    """Ids of the tokenizer; the default is GPT-2's."""
    make_vocab_size_divisible_by: PositiveInt = 128
    """Rows of the embedding are filled up to a multiple of this. It depends on no layout: choose one that the tensor
    parallel sizes you will use divide."""
    max_position_embeddings: PositiveInt = 2048
    """Longest sequence in tokens."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """A table of positions that is added to the embedding, or a rotation of queries and keys."""
    rotary_percentage: Fraction = 1.0
    """``rope``: the part of each head that is rotated, from its first channel on."""
    position_freq_base: float = 10_000.0
    """``rope``: base of the frequencies."""
    position_abf_factor: float = 1.0
    """``rope``: multiplies the base (arXiv:2309.16039)."""
    positition_interpolation_factor: float = 1.0
    """``rope``: divides the positions (arXiv:2306.15595). Spelt as in NxD Training."""
    rope_scaling: RopeScalingConfig | None = None
    """``rope``: another scaling of the frequencies than by that factor, which is then 1; ``null``: none."""
    normalization: Normalization = "layernorm"
    """``layernorm1p`` keeps its scale as a difference from one, so that weight decay pulls it to one."""
    layernorm_epsilon: NonNegativeFloat = 1e-5
    """Added to the variance, or to the mean square of ``rmsnorm``."""
    activation: Activation = "gelu"
    """``gelu`` is exact, ``gelu_tanh`` GPT-2's approximation; those in ``…glu`` are gated (arXiv:2002.05202)."""
    transformer_block_type: BlockType = "pre_ln"
    """Position of the norms of a layer. ``gpt_j``: attention and feed-forward block side by side, as in GPT-NeoX.
    ``normformer`` (arXiv:2110.09456) computes its feed-forward block on each tensor parallel rank whole, since its norm
    needs every channel."""
    has_bias: bool = True
    """Biases in the projections; those of layer norms are always there."""
    share_embeddings_and_output_weights: bool = True
    """One matrix for embedding and head."""
    score_head: bool = False
    """One score per token in place of logits, for the objective ``reward``: transformers'
    ``AutoModelForSequenceClassification`` with one label."""
    hidden_dropout: Fraction = 0.0
    """Dropout probability of the embedding and of what each block adds to the residual stream."""
    attention_dropout: Fraction = 0.0
    """Dropout probability of the attention's probabilities; with context parallelism it must be 0."""
    ffn_dropout: Fraction = 0.0
    """Dropout probability after the activation of the feed-forward block."""
    init_method_std: NonNegativeFloat = 0.02
    """Standard deviation of fresh weights."""
    use_scaled_init_method: bool = True
    """Divide it by √(2 · ``num_layers``) for the matrices that write to the residual stream."""

    @property
    def kv_heads(self) -> int:
        """``num_kv_heads`` with its default applied."""
        return self.num_kv_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """``kv_channels`` with its default applied."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """``ffn_hidden_size`` with its default applied."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def rotated_size(self) -> int:
        """Channels of a head that are rotated; 0 with learned positions."""
        return int(self.head_size * self.rotary_percentage) if self.position_embedding_type == "rope" else 0

    @property
    def scaling(self) -> RopeScalingConfig | None:
        """Scaling of the frequencies, by either key."""
        factor = self.positition_interpolation_factor
        return self.rope_scaling if factor == 1 else RopeScalingConfig(rope_type="linear", factor=factor)

    @property
    def gated(self) -> bool:
        """True if the feed-forward block has a gate."""
        return self.activation.endswith("glu")

    @property
    def fused_qkv(self) -> bool:
        """True if queries, keys and values come from one matrix, head by head, as in Megatron. It is so if no key head
        is shared."""
        return self.kv_heads == self.num_attention_heads

    @property
    def tied(self) -> bool:
        """True if the head is the embedding's matrix."""
        return self.share_embeddings_and_output_weights and not self.score_head

    @property
    def head_name(self) -> str:
        """Name of the head's module."""
        return "score" if self.score_head else "lm_head"

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding."""
        return -(-self.vocab_size // self.make_vocab_size_divisible_by) * self.make_vocab_size_divisible_by

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work together."""
        heads = self.num_attention_heads
        if self.kv_channels is None and self.hidden_size % heads:
            yield "hidden_size", f"must be a multiple of num_attention_heads ({heads}), or kv_channels be given"
        elif self.position_embedding_type == "rope" and (self.rotated_size == 0 or self.rotated_size % 2):
            yield (
                "rotary_percentage",
                f"must rotate an even number of a head's {self.head_size} channels, not {self.rotated_size}",
            )
        if heads % self.kv_heads:
            yield "num_kv_heads", f"must divide num_attention_heads ({heads})"
        for key in ("position_freq_base", "position_abf_factor", "positition_interpolation_factor"):
            if getattr(self, key) <= 0:
                yield key, "must be above 0"
        if self.rope_scaling is not None:
            if self.position_embedding_type != "rope" or self.positition_interpolation_factor != 1:
                yield "rope_scaling", "needs position_embedding_type rope and positition_interpolation_factor 1"
            base = self.position_freq_base * self.position_abf_factor
            for key, problem in self.rope_scaling.problems(pairs=self.rotated_size // 2, theta=base):
                yield f"rope_scaling.{key}", problem
        for key in ("hidden_dropout", "attention_dropout", "ffn_dropout"):
            if getattr(self, key) == 1:
                yield key, "must be below 1"

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of this section from a Hugging Face ``config.json`` (``model.model_config``)."""
        return config_from_hf(hf)

    @classmethod
    def hf_names(cls, hf: Mapping[str, Any]) -> dict[str, str]:
        """Return key of this section → key of that file."""
        return family_of(hf).values.names
