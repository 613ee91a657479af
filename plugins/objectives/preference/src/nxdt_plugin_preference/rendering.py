"""A prompt and its answers → tokens, and where the answers begin.

The prompt's tokens are those that it has in common, alone, with each conversation: a token that would reach from it
into an answer belongs to the answers, as in TRL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from nxdt_core.data.cache import digest
from nxdt_core.data.chat.conversation import Conversation, ignored_fields
from nxdt_core.data.chat.rendering import ReservedTokens, end_of_turn, runner_of
from nxdt_core.data.chat.templates import template_names
from nxdt_core.data.tokens import leading_ids, with_leading
from nxdt_core.errors.chats import TemplateMissing, TemplateRefuses
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_preference.config import UnpairedConfig
from nxdt_plugin_preference.errors import AnswersEqual, AnswersInseparable
from nxdt_plugin_preference.records import Preference, Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt and its answers, mostly two, in tokens."""

    prompt: list[int]
    answers: tuple[list[int], ...]
    header: int = 0
    """Tokens of the prompt after its last message, such as the beginning of the answer's turn, which ``keep_start``
    does not cut off."""
    scores: tuple[float, ...] = ()
    """Scores of :class:`~nxdt_plugin_preference.records.Preference`."""
    cut: bool = False
    """True if the pair was longer."""
    unused: tuple[str, ...] = ()
    """Fields of the record that the tokens do not depend on."""

    @property
    def length(self) -> int:
        """Tokens of the prompt with the longest answer."""
        return len(self.prompt) + max(map(len, self.answers))


class Renderer:
    """Tokenizes pairs.

    Texts begin as :func:`~nxdt_core.data.tokens.leading_ids` says and end with the tokenizer's end token, as far as it
    has one; messages are what the chat template writes. It is looked for when the first messages come by.

    Args:
        tokenizer: the tokenizer of the run.
        keys: choose the template, what messages may spell, and how texts begin and answers end.

    Raises:
        SpecialTokenMissing: ``data.add_bos`` asks for a token that the tokenizer lacks.
    """

    def __init__(self, tokenizer: Tokenizer, keys: UnpairedConfig) -> None:
        self._tokenizer = tokenizer
        self._keys = keys
        self._leading = leading_ids(tokenizer, add_bos=keys.add_bos)
        self._messages: _Messages | None = None

    def fingerprint(self) -> str:
        """Digest of all that decided which tokens the pairs became."""
        return digest(self._tokenizer.fingerprint(), self._messages and self._messages.settings, self._leading)

    def render(self, pair: Preference) -> Pair:
        """Return the tokens of a record.

        Raises:
            NotAChatTokenizer, TemplateMissing, TemplateUnknown, TemplateNeedsToken, TemplateUnreadable,
            DataFileNotFound, DataFileUnreadable, TextNotUtf8: messages cannot be rendered.
            EndOfTurnUntrained: the template does not end the answers.
            TemplateRefuses, AnswersInseparable, AnswersEqual, SpecialTokenInText: of the record; each names the place.
        """
        found = self._rendered(pair)
        if len(found.answers) > 1 and found.answers[0] == found.answers[1]:
            raise AnswersEqual(place=str(pair.place), where=" in tokens")
        return replace(found, scores=pair.scores, unused=(*pair.unused, *found.unused))

    def _rendered(self, pair: Preference) -> Pair:
        if not isinstance(pair.prompt, str):
            if self._messages is None:
                self._messages = _Messages(self._tokenizer, self._keys, str(pair.place))
            return self._messages.render(pair, pair.prompt)
        answers = [answer for answer in pair.answers.values() if isinstance(answer, str)]  # all, as the prompt is one
        end = [] if self._tokenizer.eos_id is None else [self._tokenizer.eos_id]
        texts = [pair.prompt, *(pair.prompt + answer for answer in answers)]
        return _parted([with_leading(ids, self._leading) for ids in self._tokenizer.encode_batch(texts)], end)


class _Messages:
    """Tokenizes pairs of messages, of which the first has ``place``."""

    def __init__(self, tokenizer: Tokenizer, keys: UnpairedConfig, place: str) -> None:
        tokenizer.locate([])  # raises where it cannot
        runner = runner_of(keys, tokenizer)
        if runner is None:
            raise TemplateMissing(known=template_names(), place=place)
        end_of_turn(runner, tokenizer)
        self._tokenizer = tokenizer
        self._runner = runner
        self._reserved = ReservedTokens(tokenizer, allowed=keys.special_tokens_in_text)
        self._keeps_space = keys.space_after_turns
        self._cuts_before_header = keys.truncation_mode == "keep_start"
        self.settings = (runner.settings, True) if keys.space_after_turns else runner.settings

    def render(self, pair: Preference, prompt: Turns) -> Pair:
        conversations: dict[str, Turns] = {}
        for key, answer in pair.answers.items():
            assert not isinstance(answer, str)
            conversations[key] = prompt + answer
            said = ((turn.content, turn.fields) for turn in conversations[key])
            self._reserved.check(said, str(pair.place), tools=pair.tools)
        try:
            texts, header, ignored = self._texts(pair, prompt, conversations, "")
        except TemplateRefuses as refusal:
            # Some templates know a turn that only calls tools by its content being null.
            if not any(turn.calls_tools and not turn.content for turns in conversations.values() for turn in turns):
                raise
            try:
                texts, header, ignored = self._texts(pair, prompt, conversations, None)
            except TemplateRefuses:
                raise refusal from None
        located = self._tokenizer.locate(texts)
        found = _parted([each.ids.tolist() for each in located])
        begins = located[0].starts[: len(found.prompt)]
        return replace(found, header=int((begins >= len(texts[0]) - header).sum()), unused=ignored)

    def _texts(
        self, pair: Preference, prompt: Turns, conversations: Mapping[str, Turns], nothing: str | None
    ) -> tuple[list[str], int, tuple[str, ...]]:
        """Return the prompt alone and each conversation up to the end of its last turn, the characters of the prompt
        after its last message, where the prompt may be cut before them, and what the template ignores.

        Space after the last turn is a part of an answer only where ``data.space_after_turns`` says so."""

        def render(conversation: Conversation, *, prompts: bool = False) -> str:
            messages = [turn.for_template(nothing) for turn in conversation.messages]
            return self._runner.run(messages, place=str(pair.place), tools=conversation.tools, prompts=prompts)[0]

        def conversation_of(turns: Turns) -> Conversation:
            return Conversation(place=pair.place, messages=turns, tools=pair.tools)

        # Some templates write more to prompt an answer than they keep once it is there, such as an empty thought.
        begins = [render(conversation_of(prompt), prompts=prompts) for prompts in (True, False)]
        header = 0
        if self._cuts_before_header:
            other = replace(prompt[-1], content="B" if prompt[-1].content.strip().endswith("A") else "A")
            changed = render(conversation_of((*prompt[:-1], other)), prompts=True)
            ends = zip(reversed(begins[0]), reversed(changed), strict=False)
            header = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
        texts, ignored = [begins[0]], dict[str, None]()
        for key, turns in conversations.items():
            conversation = conversation_of(turns)
            text = render(conversation)
            begin = next((begin for begin in begins if text.startswith(begin)), None)
            if begin is None:
                raise AnswersInseparable(place=str(pair.place), key=key)
            for number, turn in enumerate(turns[len(prompt) :], start=len(prompt) + 1):
                if turn.role == "assistant" and not turn.is_contained_in(text[len(begin) :]):
                    reason = f"it leaves out what message {number} of prompt and {key!r} says or calls"
                    origin = self._runner.template.origin
                    raise TemplateRefuses(place=str(pair.place), origin=origin, reason=reason)
            ignored |= dict.fromkeys(ignored_fields(conversation, text, render))
            texts.append(text if self._keeps_space else text.rstrip())
            follows = "no text follows" if texts[-1] == text else "data.space_after_turns leaves out the space after"
            self._runner.check_end(turns[-1], texts[-1][len(begin) :], f"{follows} an answer")
        return texts, header, tuple(ignored)


def _parted(ids: Sequence[list[int]], end: Sequence[int] = ()) -> Pair:
    """Return what a prompt alone and with each answer begin with, and what follows in each of the latter."""
    prompt, *whole = ids
    shared = min(_shared(prompt, each) for each in whole)
    answers = tuple([*each[shared:], *end] for each in whole)
    return Pair(prompt=prompt[:shared], answers=answers)


def _shared(alone: Sequence[int], whole: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(alone, whole, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(alone), len(whole)))
