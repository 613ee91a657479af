"""The keys of built-in callbacks, in addition to ``name``, in an entry of ``trainer.callbacks``. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from nxdt_core.config.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class GenerationsConfig(Section):
    """``name: generations``."""

    prompts: tuple[str, ...] = ()
    """Prompts that the model continues at each validation."""
    chat: bool = False
    """Make each a user's turn, by the tokenizer's chat template."""
    max_new_tokens: PositiveInt = 64
    """End, where the model does not end by itself."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature: 0 takes the most likely token each time; 1 samples from the model's distribution."""
    top_k: PositiveInt | None = None
    """Sample from this many most likely tokens."""
    seed: NonNegativeInt = 0
    """Seed of the samples, the same at each validation."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work, as (key, message)."""
        if not self.prompts or not all(self.prompts):
            yield "prompts", "there is none, or an empty one; give texts for the model to continue"
