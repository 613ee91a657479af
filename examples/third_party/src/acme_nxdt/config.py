"""The sections of the YAML that belong to this plugin's components. No torch here: `nxdt config check` reads it."""

from collections.abc import Mapping
from typing import Any

from nxdt_core.config.section import Section


class BigramConfig(Section):
    """Keys in addition to ``model.name: bigram``."""

    vocab_size: int = 512
    """Rows of the embedding."""
    hidden_size: int = 64
    """Width of the embedding."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Values of these keys from a Hugging Face ``config.json``: the inverse of ``BigramBuilder.config_to_hf``."""
        return {"vocab_size": hf["vocab_size"], "hidden_size": hf["hidden_size"]}


class LionConfig(Section):
    """Keys in addition to ``model.optim.name: acme-lion``."""

    lr: float = 1e-4
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled decay."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Weight of the momentum in the update, and in the momentum itself."""


class SumsConfig(Section):
    """Keys in addition to ``data.name: sums``."""

    count: int = 1000
    """Samples of the training split."""


class InverseSqrtConfig(Section):
    """Keys in addition to ``model.optim.sched.name: inverse_sqrt``."""

    warmup_steps: int = 10
    """Steps of linear warm-up."""
