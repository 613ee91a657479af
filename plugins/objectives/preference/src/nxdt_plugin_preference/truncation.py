"""Pairs that are too long are cut, first the prompt, then the answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nxdt_plugin_preference.config import TruncationMode
from nxdt_plugin_preference.errors import NoRoomForAnswers
from nxdt_plugin_preference.rendering import Pair

__all__ = ["Fitting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """The rule of TRL's DPO trainer up to 0.10, which NxD Training uses.

    Raises:
        NoRoomForAnswers: a prompt that is cut leaves no answer.
    """

    seq_length: int
    max_prompt_length: int
    mode: TruncationMode

    def __post_init__(self) -> None:
        if self.max_prompt_length >= self.seq_length:
            raise NoRoomForAnswers(prompt=self.max_prompt_length, sequence=self.seq_length)

    def fit(self, pair: Pair) -> Pair:
        """Return as much of the prompt and of the answers as a sequence holds; ``pair`` itself where that is all."""
        if max(pair.lengths) <= self.seq_length:
            return pair
        limit = self.max_prompt_length
        prompt = pair.prompt[:limit] if self.mode == "keep_start" else pair.prompt[-limit:]
        left = self.seq_length - len(prompt)
        return replace(pair, prompt=prompt, chosen=pair.chosen[:left], rejected=pair.rejected[:left], cut=True)
