"""Section ``model`` of a Llama, Mistral, Qwen2 or Qwen3. No torch here: ``nxdt config check`` reads this module."""

from __future__ import annotations

from typing import ClassVar

from nxdt_core.config.section import PositiveInt
from nxdt_core.models.decoder_config import RotaryDecoderConfig
from nxdt_core.models.huggingface import HFFamily
from nxdt_core.models.rope_scaling import RopeScalingConfig
from nxdt_plugin_llama.hf import LLAMA, MISTRAL, QWEN2, QWEN3

__all__ = ["LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config", "RopeScalingConfig"]


class LlamaConfig(RotaryDecoderConfig):
    """Architecture of a Llama; the names of the keys are NxD Training's."""

    hf_family: ClassVar[HFFamily] = LLAMA

    mlp_bias: bool = False
    """Biases of the three projections of feed-forward blocks."""

    @property
    def biased(self) -> tuple[str, ...]:
        """Names within a layer of the modules that have biases."""
        return (*super().biased, *(f"mlp.{name}_proj" for name in ("gate", "up", "down") if self.mlp_bias))


class MistralConfig(LlamaConfig):
    """Architecture of a Mistral: a Llama whose tokens see the last few only."""

    hf_family: ClassVar[HFFamily] = MISTRAL

    sliding_window: PositiveInt | None = 4096
    """Tokens that one sees, itself included; ``null``: all before it, as in Mistral 7B v0.2 and later."""
    max_position_embeddings: PositiveInt = 32768
    """Longest sequence in tokens."""

    @property
    def window(self) -> int | None:
        """``sliding_window``."""
        return self.sliding_window


class Qwen2Config(LlamaConfig):
    """Architecture of a Qwen2 or Qwen2.5: a Llama whose queries, keys and values have biases."""

    hf_family: ClassVar[HFFamily] = QWEN2

    qkv_bias: bool = True
    """Biases of queries, keys and values alone."""


class Qwen3Config(LlamaConfig):
    """Architecture of a dense Qwen3: a Llama whose heads' queries and keys are normalised."""

    hf_family: ClassVar[HFFamily] = QWEN3

    qk_norm: bool = True
    """RMSNorm of each head's queries and keys before they are rotated."""
