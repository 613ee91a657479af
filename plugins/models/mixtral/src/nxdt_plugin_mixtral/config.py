"""Section ``model`` of a Mixtral. No torch here: ``nxdt config check`` reads this module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from nxdt_core.config.annotations import PositiveInt
from nxdt_core.models.decoder_config import RotaryDecoderConfig
from nxdt_core.models.huggingface import HFFamily
from nxdt_plugin_mixtral.hf import MIXTRAL
from nxdt_plugin_mixtral.moe import MoEConfig

__all__ = ["MixtralConfig", "MoEConfig"]


class MixtralConfig(RotaryDecoderConfig):
    """Architecture of a Mixtral; the names of the keys are NxD Training's."""

    hf_family: ClassVar[HFFamily] = MIXTRAL

    ffn_hidden_size: PositiveInt
    """Width of an expert (``intermediate_size`` of Hugging Face)."""
    max_position_embeddings: PositiveInt = 32768
    """Longest sequence in tokens."""
    sliding_window: PositiveInt | None = None
    """Tokens that one sees, itself included; ``null``: all before it, as in the released models."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary frequencies."""
    moe: MoEConfig = Field(default_factory=MoEConfig)
    """The mixture of experts."""

    @property
    def window(self) -> int | None:
        """``sliding_window``."""
        return self.sliding_window

    @property
    def expert_layers(self) -> frozenset[int]:
        """Numbers of the layers that have experts."""
        return frozenset(n for n in range(self.num_layers) if (n + 1) % self.moe.frequency == 0)

    @property
    def dense_layers(self) -> int:
        """Number of layers with a plain feed-forward block instead of experts."""
        return self.num_layers - len(self.expert_layers)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work together."""
        yield from super().check()
        for key, problem in self.moe.check():
            yield f"moe.{key}", problem
        if self.moe.frequency > self.num_layers:
            yield "moe.frequency", f"leaves none of {self.num_layers} layers with experts"
