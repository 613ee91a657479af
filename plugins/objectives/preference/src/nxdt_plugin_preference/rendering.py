"""A prompt and two answers → tokens, and where the answers begin.

The prompt's tokens are those that it has in common, alone, with both conversations: a token that would reach from it
into an answer belongs to the answers, as in TRL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nxdt_core.data.chat import Messages, ReservedTokens, runner_of
from nxdt_core.data.chat_keys import ChatKeys
from nxdt_core.data.chat_templates import template_names
from nxdt_core.data.digest import digest
from nxdt_core.errors import NotAChatTokenizer, TemplateMissing
from nxdt_core.protocols.tokenizer import ChatTokenizer, Tokenizer
from nxdt_plugin_preference.errors import AnswersInseparable
from nxdt_plugin_preference.records import Preference

__all__ = ["Pair", "Renderer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt and two answers, in tokens."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    cut: bool = False
    """Whether it was longer."""

    @property
    def answers(self) -> tuple[list[int], list[int]]:
        """The chosen one, then the rejected one."""
        return self.chosen, self.rejected

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the prompt with each answer."""
        return len(self.prompt) + len(self.chosen), len(self.prompt) + len(self.rejected)


class Renderer:
    """Tokenizes pairs.

    Texts get the tokenizer's begin and end tokens, as far as it has them; messages what the chat template writes. It
    is looked for when the first messages come by.

    Args:
        tokenizer: of the run.
        keys: choose the template and what messages may spell.
    """

    def __init__(self, tokenizer: Tokenizer, keys: ChatKeys) -> None:
        self._tokenizer = tokenizer
        self._keys = keys
        self._messages: _Messages | None = None

    def fingerprint(self) -> str:
        """Digest of all that decided which tokens the pairs became."""
        return digest(self._tokenizer.fingerprint(), self._messages and self._messages.settings)

    def render(self, pair: Preference) -> Pair:
        """The tokens of a record.

        Raises:
            NotAChatTokenizer, TemplateMissing, TemplateUnknown, TemplateNeedsToken, TemplateUnreadable,
            DataFileNotFound, DataFileUnreadable, TextNotUtf8: messages cannot be rendered.
            TemplateRefuses, AnswersInseparable, SpecialTokenInText: of the record; each names the place.
        """
        if not isinstance(pair.prompt, str):
            if self._messages is None:
                self._messages = _Messages(self._tokenizer, self._keys, pair.place)
            return self._messages.render(pair, pair.prompt)
        assert isinstance(pair.chosen, str)  # the answers of a record are of its prompt's kind
        assert isinstance(pair.rejected, str)
        begin, end = ([] if id_ is None else [id_] for id_ in (self._tokenizer.bos_id, self._tokenizer.eos_id))
        texts = [pair.prompt, pair.prompt + pair.chosen, pair.prompt + pair.rejected]
        return _parted(self._tokenizer.encode_batch(texts), begin, end)


class _Messages:
    """Tokenizes pairs of messages, of which the first has ``place``."""

    def __init__(self, tokenizer: Tokenizer, keys: ChatKeys, place: str) -> None:
        if not isinstance(tokenizer, ChatTokenizer):
            raise NotAChatTokenizer(tokenizer=type(tokenizer).__name__)
        runner = runner_of(keys, tokenizer)
        if runner is None:
            raise TemplateMissing(known=template_names(), place=place)
        self._tokenizer: ChatTokenizer = tokenizer
        self._runner = runner
        self._reserved = ReservedTokens(tokenizer, allowed=keys.special_tokens_in_text)
        self.settings = runner.settings

    def render(self, pair: Preference, prompt: Messages) -> Pair:
        texts = [self._written(pair, prompt, prompts=True)]
        for key, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            assert not isinstance(answer, str)
            texts.append(self._answered(pair, prompt, answer, key))
        return _parted([located.ids.tolist() for located in self._tokenizer.locate(texts)])

    def _answered(self, pair: Preference, prompt: Messages, answer: Messages, key: str) -> str:
        """A whole conversation up to the end of its last turn; space behind that is nobody's answer."""
        whole = [*prompt, *answer]
        self._reserved.check((message.get("content") or "" for message in whole), pair.place)
        text = self._written(pair, whole)
        # Some templates write more to prompt an answer than they keep once it is there, such as an empty thought.
        if not any(text.startswith(self._written(pair, prompt, prompts=prompts)) for prompts in (True, False)):
            raise AnswersInseparable(place=pair.place, key=key)
        return text.rstrip()

    def _written(self, pair: Preference, messages: Messages, *, prompts: bool = False) -> str:
        return self._runner.run(messages, place=pair.place, tools=pair.tools, prompts=prompts)[0]


def _parted(ids: Sequence[Sequence[int]], begin: Sequence[int] = (), end: Sequence[int] = ()) -> Pair:
    """Of a prompt alone and with either answer: what all three begin with, and what follows in each of the latter."""
    prompt, chosen, rejected = ids
    shared = min(_shared(prompt, chosen), _shared(prompt, rejected))
    return Pair(prompt=[*begin, *prompt[:shared]], chosen=[*chosen[shared:], *end], rejected=[*rejected[shared:], *end])


def _shared(alone: Sequence[int], whole: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(alone, whole, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(alone), len(whole)))
