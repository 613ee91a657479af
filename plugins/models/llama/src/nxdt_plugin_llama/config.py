"""Section ``model`` of a Llama or Mistral. No torch here: ``nxdt config check`` reads this module."""

from __future__ import annotations

from typing import ClassVar

from nxdt_core.config.annotations import PositiveInt
from nxdt_core.models.decoder_config import RotaryDecoderConfig
from nxdt_core.models.huggingface import HFFamily
from nxdt_core.models.rope_scaling import RopeScalingConfig
from nxdt_plugin_llama.hf import LLAMA, MISTRAL

__all__ = ["LlamaConfig", "MistralConfig", "RopeScalingConfig"]


class LlamaConfig(RotaryDecoderConfig):
    """Architecture of a Llama; the names of the keys are NxD Training's."""

    hf_family: ClassVar[HFFamily] = LLAMA

    rope_scaling: RopeScalingConfig | None = None
    """Scaling of the rotary frequencies; ``null``: none."""

    @property
    def scaling(self) -> RopeScalingConfig | None:
        """``rope_scaling``."""
        return self.rope_scaling


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
