"""The keys of ``objective:``, ``data:`` and of the rewards that belong to this plugin. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from nxdt_core.config.section import NamesModel, NonNegativeFloat, PositiveInt, Range, Section
from nxdt_core.data.chat.templates import ChatKeys

NUMBER = r"(?:(?<![\w)])-)?\$?(?<!\d)(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
"""Regular expression of a number such as ``-1,450.50``, ``$.50`` or ``1e3``; the hyphen of ``10-12`` is not a minus."""


class GrpoConfig(Section):
    """``objective: {name: grpo}``: answers that score better than others to the same prompt become likelier.

    ``data.global_batch_size`` and ``data.micro_batch_size`` count prompts.
    """

    rewards: tuple[str | Mapping[str, Annotated[Any, NamesModel()]], ...] = ()
    """Functions that score the answers: names of components of the kind ``reward``, or mappings of ``name`` and the
    component's own keys. Further keys of a mapping are ``weight`` (1 where it is left out), ``timeout`` (seconds that a
    call may take) and ``on_error``: ``stop`` the run, or ``none``, so that the answers have no score. An answer's
    reward is the weighted sum of its scores."""
    num_generations: PositiveInt = 8
    """Answers to each prompt, at least 2: a group."""
    max_completion_length: PositiveInt = 256
    """Tokens of an answer at most. Prompt and answer fit into ``data.seq_length``; longer prompts are an error."""
    temperature: NonNegativeFloat = 1.0
    """Divisor of the logits that answers are drawn from, and of those whose log-probabilities the loss takes."""
    top_p: Annotated[float, Range(0.0, 1.0)] | None = None
    """Draw among the likeliest tokens whose probabilities add up to this share. As with TRL, the loss takes
    log-probabilities over all tokens; so with ``top_k``, ``min_p`` and ``repetition_penalty``."""
    top_k: PositiveInt | None = None
    """Draw among this many likeliest tokens."""
    min_p: Annotated[float, Range(0.0, 1.0)] | None = None
    """Draw among tokens that are at least this share as likely as the likeliest."""
    repetition_penalty: NonNegativeFloat = 1.0
    """Divide the positive logits of tokens that occurred, and multiply the negative ones."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer. Rewards see the answer without them; the loss counts their tokens."""
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
    loss_type: Literal["dapo", "grpo", "bnpo", "dr_grpo", "cispo"] = "dapo"
    """A mean over the tokens of all answers (``dapo``), over answers of the mean over their tokens (``grpo``), over
    micro-batches of the mean over their tokens (``bnpo``), or over answers of the sum over their tokens divided by
    ``max_completion_length`` (``dr_grpo``). ``cispo`` is a mean over all tokens, too: of their log-probabilities times
    the advantage and the ratio, which has no gradient and is at most ``epsilon_high``."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Take ratios of a token's probabilities, or for all tokens of an answer the geometric mean of theirs (GSPO)."""
    top_entropy_quantile: Annotated[float, Range(0.0, 1.0)] = 1.0
    """Take the loss of this share of the answers' tokens, those whose distributions have the greatest entropies in the
    global batch (Wang et al. 2025, arXiv:2506.01939, which has 0.2). The divergence is of all tokens. It takes another
    forward pass at each step."""
    mask_truncated_completions: bool = False
    """Leave the tokens of answers that were cut off out of the loss (DAPO)."""

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Return the names of the rewards, in order."""
        return tuple(reward if isinstance(reward, str) else str(reward.get("name")) for reward in self.rewards)

    @property
    def reward_model(self) -> tuple[str, str] | None:
        """Return the key and the address of the reward model; None without one."""
        for number, (name, entry) in enumerate(zip(self.reward_names, self.rewards, strict=True)):
            if name in ("model", "grpo:model") and isinstance(entry, Mapping):
                return f"objective.rewards[{number}].path", str(entry.get("path"))
        return None

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work, as (key, message)."""
        if len({*self.reward_names}) < len(self.rewards):
            yield "rewards", "a reward is named twice"
        if self.num_generations < 2:
            yield "num_generations", "an answer is compared with others to the same prompt: at least 2"
        if not self.rewards:
            yield "rewards", "no reward is named; list at least one, such as match"
        for key in ("temperature", "repetition_penalty"):
            if not getattr(self, key):
                yield key, "must be above 0"
        if self.loss_type == "cispo" and self.epsilon_high is None:
            yield "epsilon_high", "loss_type cispo needs it: the greatest ratio, such as 5.0"
        if not all(self.stop):
            yield "stop", "has an empty text"


class SamplesConfig(Section):
    """``name: samples`` in ``trainer.callbacks``."""

    every_n_steps: PositiveInt = 10
    """Steps between two tables."""
    prompts: PositiveInt = 2
    """Prompts of the first rank whose answers a table has."""


class PromptsConfig(ChatKeys):
    """``data: {name: prompts}``: records with ``prompt``, a text or messages, and what rewards need.

    Files are JSONL, JSON with a list, CSV, TSV, Arrow or Parquet, or directories of one of these. Texts are used
    unchanged; a chat template renders messages and the beginning of the answer.
    """


class MatchConfig(Section):
    """``{name: match}``."""

    pattern: str = rf"({NUMBER})\D*$"
    """Regular expression whose first group, or which itself, is the solution in the answer; the default finds its last
    number."""
    key: str = "solution"
    """Field of the record with the solution, which may follow ``####`` as in GSM8K."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work, as (key, message)."""
        yield from _pattern_problems(self.pattern)


def _pattern_problems(pattern: str) -> Iterator[tuple[str, str]]:
    try:
        re.compile(pattern)
    except re.error as error:
        yield "pattern", f"{pattern!r} is not a regular expression: {error}"


class ModelConfig(Section):
    """``{name: model}``."""

    path: str
    """Address of a reward model: a Hugging Face directory of a sequence classifier with one label, one of the hub
    (``hf:owner/name``), the directory of a run of the objective ``reward``, or the address of its checkpoints or of one
    of them. It has the run's tokenizer."""


class FormatConfig(Section):
    """``{name: format}``."""

    pattern: str
    """Regular expression that the whole answer must match, such as ``<think>.*</think>.*``; ``.`` matches newlines."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work, as (key, message)."""
        yield from _pattern_problems(self.pattern)


class LengthConfig(Section):
    """``{name: length}``."""

    target: PositiveInt
    """Tokens that an answer may have at no cost."""
    scale: PositiveInt = 100
    """Tokens beyond them that cost 1."""


class OverlongConfig(Section):
    """``{name: overlong}``."""

    max_completion_len: PositiveInt
    """Tokens from which on an answer scores −1, mostly ``objective.max_completion_length``."""
    soft_punish_cache: PositiveInt
    """Tokens before them, over which the score falls from 0 to −1."""


class RepetitionConfig(Section):
    """``{name: repetition}``."""

    ngram_size: PositiveInt = 3
    """Tokens of the sequences that should not occur again."""
    max_penalty: Annotated[float, Range(high=0.0)] = -1.0
    """Score of an answer whose sequences are all the same; one without a repetition scores 0."""


class CharactersConfig(Section):
    """``{name: characters}``."""

    key: str = "characters"
    """Field of the record with the characters that an answer may have."""
