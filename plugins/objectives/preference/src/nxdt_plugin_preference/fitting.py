"""Pairs that are too long are cut, first the prompt, then the answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nxdt_plugin_preference.config import TruncationMode
from nxdt_plugin_preference.errors import NoRoomForAnswers
from nxdt_plugin_preference.rendering import Answer

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

    def fit(self, chosen: Answer, rejected: Answer) -> tuple[Answer, Answer]:
        """Both answers with as much of the prompt and of themselves as a sequence holds."""
        pair = (chosen, rejected)
        longest = max(len(one.answer) for one in pair)
        if max(len(one.prompt) for one in pair) + longest <= self.seq_length:
            return pair
        return self._cut(chosen), self._cut(rejected)

    def _cut(self, one: Answer) -> Answer:
        limit = self.max_prompt_length
        prompt = one.prompt[:limit] if self.mode == "keep_start" else one.prompt[-limit:]
        return replace(one, prompt=prompt, answer=one.answer[: self.seq_length - len(prompt)])
