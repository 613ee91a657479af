"""A prompt and two answers → tokens, and where the answers begin.

The prompt's tokens are those that it has in common, alone, with both conversations: a token that would reach from it
into an answer belongs to the answers, as in TRL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nxdt_core.config.paths import resolve_path
from nxdt_core.data.chat import Messages, render
from nxdt_core.data.digest import digest
from nxdt_core.data.files import decode, read_bytes
from nxdt_core.errors import DataFileNotFound
from nxdt_core.protocols.tokenizer import ChatTokenizer, Tokenizer
from nxdt_plugin_preference.errors import AnswersInseparable, SpecialTokenInText
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

    Texts get the tokenizer's begin and end tokens, as far as it has them; messages what the chat template writes.

    Args:
        tokenizer: of the run.
        template_file: None takes the tokenizer's own template.
        special_tokens_in_text: whether texts of messages may spell special tokens.

    Raises:
        DataFileNotFound, DataFileUnreadable, TextNotUtf8: of the template's file.
    """

    def __init__(
        self, tokenizer: Tokenizer, template_file: Path | None = None, *, special_tokens_in_text: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = tokenizer if isinstance(tokenizer, ChatTokenizer) else None
        self._template = self._chat.chat_template() if self._chat else None
        if template_file is not None:
            path = resolve_path(template_file)
            if not path.is_file():
                raise DataFileNotFound(key="data.chat_template_file", path=str(template_file))
            self._template = decode(path, read_bytes(path))
        self._reserved = () if special_tokens_in_text or self._chat is None else tuple(self._chat.reserved_tokens())

    def fingerprint(self) -> str:
        """Digest of all that decides which tokens a pair becomes."""
        return digest(self._tokenizer.fingerprint(), self._template)

    def render(self, pair: Preference) -> Pair:
        """The tokens of a record.

        Raises:
            ChatTemplateMissing, ChatTemplateRefuses, AnswersInseparable, SpecialTokenInText: each names the place.
        """
        prompt, chosen, rejected = pair.prompt, pair.chosen, pair.rejected
        if isinstance(prompt, str):
            assert isinstance(chosen, str)  # the answers of a record are of its prompt's kind
            assert isinstance(rejected, str)
            begin, end = ([] if id_ is None else [id_] for id_ in (self._tokenizer.bos_id, self._tokenizer.eos_id))
            ids = self._tokenizer.encode_batch([prompt, prompt + chosen, prompt + rejected])
            return _parted(ids, begin, end)
        assert not isinstance(chosen, str)
        assert not isinstance(rejected, str)
        texts = [self._written(pair, prompt, prompts=True)]
        for key, answer in (("chosen", chosen), ("rejected", rejected)):
            texts.append(self._answered(pair, prompt, answer, key))
        assert self._chat is not None  # nothing else renders
        return _parted([located.ids.tolist() for located in self._chat.locate(texts)])

    def _answered(self, pair: Preference, prompt: Messages, answer: Messages, key: str) -> str:
        """A whole conversation up to the end of its last turn; space behind that is nobody's answer."""
        self._check_texts(pair.place, [*prompt, *answer])
        text = self._written(pair, [*prompt, *answer])
        # Some templates write more to prompt an answer than they keep once it is there, such as an empty thought.
        if not any(text.startswith(self._written(pair, prompt, prompts=prompts)) for prompts in (True, False)):
            raise AnswersInseparable(place=pair.place, key=key)
        return text.rstrip()

    def _written(self, pair: Preference, messages: Messages, *, prompts: bool = False) -> str:
        return render(
            messages, self._tokenizer, place=pair.place, template=self._template, prompts=prompts, tools=pair.tools
        )

    def _check_texts(self, place: str, messages: Messages) -> None:
        for message in messages:
            for token in self._reserved:
                if token in (message.get("content") or ""):
                    raise SpecialTokenInText(place=place, token=token)


def _parted(ids: Sequence[Sequence[int]], begin: Sequence[int] = (), end: Sequence[int] = ()) -> Pair:
    """Of a prompt alone and with either answer: what all three begin with, and what follows in each of the latter."""
    prompt, chosen, rejected = ids
    shared = min(_shared(prompt, chosen), _shared(prompt, rejected))
    return Pair(prompt=[*begin, *prompt[:shared]], chosen=[*chosen[shared:], *end], rejected=[*rejected[shared:], *end])


def _shared(alone: Sequence[int], whole: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(alone, whole, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(alone), len(whole)))
