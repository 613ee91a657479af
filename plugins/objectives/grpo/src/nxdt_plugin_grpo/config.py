"""The keys of ``objective:``, ``data:`` and of the rewards that belong to this plugin. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from nxdt_core.config.annotations import NonNegativeFloat, PositiveInt
from nxdt_core.config.section import Section
from nxdt_core.data.chat.templates import ChatKeys


class GrpoConfig(Section):
    """``objective: {name: grpo}``: answers that score better than others to the same prompt become likelier.

    ``data.global_batch_size`` and ``data.micro_batch_size`` count prompts. Answers are drawn from the model's own
    distribution, at temperature 1.
    """

    rewards: tuple[str | Mapping[str, Any], ...] = ()
    """What scores the answers: names of components of the kind ``reward``, or mappings of ``name``, ``weight`` (1
    where it is left out) and the component's own keys. An answer's reward is their weighted sum."""
    num_generations: PositiveInt = 8
    """Answers to each prompt, at least 2: a group."""
    max_completion_length: PositiveInt = 256
    """Tokens of an answer at most. Prompt and answer fit into ``data.seq_length``; longer prompts are an error."""
    num_iterations: PositiveInt = 1
    """Optimizer steps on each set of answers. Of so many steps, the prompts of the first are used."""
    beta: NonNegativeFloat = 0.0
    """Weight of the divergence from the model below the adapter, which must be there where this is above 0."""
    epsilon: NonNegativeFloat = 0.2
    """Probability ratios below 1 − ε, and above 1 + ε, give no further gradient (Schulman et al. 2017)."""
    epsilon_high: NonNegativeFloat | None = None
    """Another ε for ratios above 1; ``null``: the same."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide an answer's advantage by the standard deviation of its group's rewards, by that of all of the global
    batch, or by nothing (Dr. GRPO)."""
    loss_type: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """A mean over the tokens of all answers (``dapo``), over answers of the mean over their tokens (``grpo``), or over
    answers of the sum over their tokens divided by ``max_completion_length`` (``dr_grpo``)."""

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Return the names of the rewards, in order."""
        return tuple(each if isinstance(each, str) else str(each.get("name")) for each in self.rewards)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work, as (key, message)."""
        if len({*self.reward_names}) < len(self.rewards):
            yield "rewards", "a reward is named twice"
        if self.num_generations < 2:
            yield "num_generations", "an answer is compared with others to the same prompt: at least 2"
        if not self.rewards:
            yield "rewards", "no reward is named; list at least one, such as match"


class PromptsConfig(ChatKeys):
    """``data: {name: prompts}``: records with ``prompt``, a text or messages, and what rewards need.

    Files are JSONL, JSON with a list, CSV, TSV, Arrow or Parquet, or directories of one of these. Texts are used
    unchanged; a chat template renders messages and the beginning of the answer.
    """


NUMBER = r"(?:(?<![\w)])-)?\$?(?<!\d)(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
"""Regular expression of a number such as ``-1,450.50``, ``$.50`` or ``1e3``; the hyphen of ``10-12`` is not a minus."""


class MatchConfig(Section):
    """``{name: match}``."""

    pattern: str = rf"({NUMBER})\D*$"
    """Regular expression whose first group, or which itself, is the solution in the answer; the default finds its last
    number."""
    key: str = "solution"
    """Field of the record with the solution, which may follow ``####`` as in GSM8K."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work, as (key, message)."""
        try:
            re.compile(self.pattern)
        except re.error as error:
            yield "pattern", f"{self.pattern!r} is not a regular expression: {error}"


class CharactersConfig(Section):
    """``{name: characters}``."""

    key: str = "characters"
    """Field of the record with the characters that an answer may have."""
