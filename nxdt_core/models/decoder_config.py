"""Section ``model`` of a decoder with rotary positions: the keys that Llama, Mistral and Mixtral have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from nxdt_core.config.section import NonNegativeFloat, PositiveInt, Section
from nxdt_core.models.huggingface import HFFamily
from nxdt_core.models.rope_scaling import RopeScalingConfig


class RotaryDecoderConfig(Section):
    """Architecture of a decoder with rotary positions, RMSNorm and SwiGLU; the names of the keys are NxD Training's.

    A model inherits from it, sets ``hf_family`` and adds keys or other defaults::

        class AcmeConfig(RotaryDecoderConfig):
            hf_family: ClassVar[HFFamily] = ACME
            rope_theta: float = 500_000.0
    """

    hf_family: ClassVar[HFFamily]
    """The corresponding model of Hugging Face."""

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
    attention_bias: bool = False
    """Biases of the four projections of attention."""
    qkv_bias: bool = False
    """Biases of queries, keys and values alone, as in Qwen2."""
    qk_norm: bool = False
    """RMSNorm of each head's queries and keys before they are rotated, as in Qwen3."""
    attention_scale: NonNegativeFloat | None = None
    """Factor of query · key in attention scores; ``null``: 1 / √(width of a head). Gemma 2 has
    1 / √``query_pre_attn_scalar``."""
    attention_softcap: NonNegativeFloat | None = None
    """Cap ``c`` of attention scores, which become c · tanh(score / c); ``null``: none. Gemma 2 calls it
    ``attn_logit_softcapping``. No fused kernel has it: the scores of whole sequences are in memory."""
    logits_softcap: NonNegativeFloat | None = None
    """Cap of the logits, which works in the same way; ``null``: none. Gemma 2 calls it ``final_logit_softcapping``. The
    scores of a ``score_head`` have none."""
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
    score_head: bool = False
    """One score per token in place of logits, for the objective ``reward``: transformers'
    ``AutoModelForSequenceClassification`` with one label."""
    neftune_noise_alpha: NonNegativeFloat = 0.0
    """Noise on embeddings while training: uniform within ± this / √(``data.seq_length`` · ``hidden_size``) (NEFTune,
    Jain et al. 2023, arXiv:2310.05914, which has 5 to 15)."""
    init_method_std: NonNegativeFloat = 0.02
    """Standard deviation of fresh weights (``initializer_range`` of Hugging Face)."""
    use_scaled_init_method: bool = True
    """Divide it by √(2 · ``num_layers``) for the matrices that write to the residual stream."""

    @property
    def kv_heads(self) -> int:
        """Return ``num_kv_heads`` with its default applied."""
        return self.num_kv_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Return ``head_dim`` with its default applied."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def biased(self) -> tuple[str, ...]:
        """Names within a layer of the modules that have biases."""
        return tuple(f"attention.{n}_proj" for n in ("qkvo" if self.attention_bias else "qkv" if self.qkv_bias else ""))

    @property
    def tied(self) -> bool:
        """Return whether the head is the embedding's matrix."""
        return self.share_embeddings_and_output_weights and not self.score_head

    @property
    def head_name(self) -> str:
        """Name of the head's module."""
        return "score" if self.score_head else "lm_head"

    @property
    def window(self) -> int | None:
        """Return how many tokens each token attends to, itself included; None for all before it. A model with a sliding
        window overrides it."""
        return None

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of this section from a Hugging Face ``config.json`` (``model.model_config``)."""
        return cls.hf_family.read(hf)

    @classmethod
    def hf_names(cls, hf: Mapping[str, Any]) -> dict[str, str]:
        """Return key of this section → key of that file; keys within a section of it are dotted."""
        return cls.hf_family.values.names

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work together."""
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            yield "hidden_size", f"must be a multiple of num_attention_heads ({heads}), or head_dim be given"
        elif self.head_size % 2:
            yield "head_dim", f"must be even for the rotary embedding, not {self.head_size}"
        if heads % self.kv_heads:
            yield "num_kv_heads", f"must divide num_attention_heads ({heads})"
        for key in ("rope_theta", "attention_scale", "attention_softcap", "logits_softcap"):
            if getattr(self, key) is not None and getattr(self, key) <= 0:
                yield key, "must be above 0"
        if self.rope_scaling is not None:
            for key, problem in self.rope_scaling.problems(pairs=self.head_size // 2, theta=self.rope_theta):
                yield f"rope_scaling.{key}", problem
