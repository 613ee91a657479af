"""Renders conversations as text and locates the messages in it that have a loss.

If a template has generation blocks, they mark what the assistant writes. Otherwise, a message is the text between two
renderings: that of the preceding messages with the generation prompt, and that of the messages up to and including it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from nxdt_core.data.chat.conversation import Conversation, Message, ignored_fields
from nxdt_core.data.chat.rendering import Span, TemplateRunner
from nxdt_core.errors.chats import EndOfTurnUntrained, TemplateRefuses
from nxdt_plugin_sft_chat.errors import TurnsInseparable

_OPENED = re.compile(r"[<\[][^>\]\s]*$")

_THOUGHTS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
"""Reasoning that templates write or leave out in turns before the user's last one."""

_LOOK = 16
"""Characters of a turn that are compared before all of it is."""

_CHECKED = 32
"""Conversations in which generation blocks are compared with prefixes: they show the template, not the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The text of a conversation."""

    text: str
    trained: Mapping[int, Span]
    """Number of a message, from 0 → from the first to the last character that the loss is on."""
    learnt: tuple[Span, ...]
    """The characters that the loss is on; a template may leave out some within a message."""
    ignored: tuple[str, ...]
    """Parts of the conversation that the template does not write."""


class Renderer:
    """Renders conversations with one template, which ``runner`` runs."""

    def __init__(self, runner: TemplateRunner) -> None:
        self.runner = runner
        self._template = runner.template
        self._to_check = _CHECKED
        self._nothing: str | None = ""

    def render(self, conversation: Conversation, trained: Sequence[int]) -> Rendered:
        """Render ``conversation`` and find the messages ``trained`` in it.

        Raises:
            TemplateUnreadable: the template is none.
            TemplateRefuses: it raises an exception for these messages.
            TurnsInseparable: the position of a message cannot be determined.
            EndOfTurnUntrained: what ends a turn is not part of what is trained.
        """
        try:
            return self._render(conversation, trained)
        except TemplateRefuses:
            # Some templates know a turn that only calls tools by its content being null; others cannot have that.
            if self._nothing is None or not any(m.calls and not m.content for m in conversation.messages):
                raise
            self._nothing = None
            try:
                return self._render(conversation, trained)
            except TemplateRefuses:
                self._nothing = ""
            raise

    def _render(self, conversation: Conversation, trained: Sequence[int]) -> Rendered:
        if self._template.marks_generation:
            text, spans_of = self._marked(conversation, trained)
        else:
            text, _ = self._run(conversation, len(conversation.messages))
            try:
                spans_of = {number: [self._between_prefixes(conversation, number, text)] for number in trained}
            except TurnsInseparable:  # prefixes may have reasoning that the whole conversation no longer has
                messages = list(conversation.messages)
                for number, message in enumerate(messages):
                    for other in message.without_reasoning():
                        tried = replace(conversation, messages=[*messages[:number], other, *messages[number + 1 :]])
                        if self._run(tried, len(messages))[0] == text:
                            messages[number] = other
                            break
                shortened = replace(conversation, messages=messages)
                spans_of = {number: [self._between_prefixes(shortened, number, text)] for number in trained}
        turns = {number: (spans[0][0], spans[-1][1]) for number, spans in spans_of.items()}
        for number, (start, end) in turns.items():
            message, said = conversation.messages[number], text[start:end]
            if message.role == "assistant":
                if not message.is_contained_in(said):
                    reason = f"it leaves out what message {number + 1} says or calls"
                    raise TemplateRefuses(place=str(conversation.place), origin=self._template.origin, reason=reason)
                self.runner.check_end(message, said, "no text follows an answer")
        ignored = ignored_fields(conversation, text, lambda other: self._run(other, len(other.messages))[0])
        learnt = tuple(span for spans in spans_of.values() for span in spans)
        return Rendered(text=text, trained=turns, learnt=learnt, ignored=ignored)

    def _marked(self, conversation: Conversation, trained: Sequence[int]) -> tuple[str, dict[int, list[Span]]]:
        messages = conversation.messages
        text, blocks = self._run(conversation, len(messages), marks=True)
        spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
        groups = [[block] for block in blocks]  # the blocks of each turn
        if len(blocks) != len(spoken):
            between = [messages[i + 1 : j] for i, j in pairwise(spoken)]
            groups = groups[:1]
            for (_, end), block in pairwise(blocks):
                heard = between[len(groups) - 1] if len(groups) <= len(between) else ()
                if heard and all(message.content.strip() in text[end : block[0]] for message in heard):
                    groups.append([])
                groups[-1].append(block)
        if groups and len(groups) != len(spoken):
            reason = f"it has {len(blocks)} generation blocks for {len(spoken)} turns of the assistant"
            raise self._inseparable(conversation, spoken[0] if spoken else 0, reason)
        marked = dict(zip(spoken, groups, strict=False))
        if self._to_check:
            self._to_check -= 1
            for number, (*_, (_, end)) in marked.items():
                try:
                    wanted = self._between_prefixes(conversation, number, text)[1]
                except (TurnsInseparable, TemplateRefuses):
                    continue
                if end < wanted:
                    reason = f"its generation blocks leave out {text[end:wanted]!r}"
                    raise EndOfTurnUntrained(origin=self._template.origin, reason=reason)
        return text, {i: marked.get(i) or [self._between_prefixes(conversation, i, text)] for i in trained}

    def _run(
        self, conversation: Conversation, count: int, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """The first ``count`` messages, and generation blocks where ``marks`` asks for them."""
        messages = [message.for_template(self._nothing) for message in conversation.messages[:count]]
        place = str(conversation.place)
        return self.runner.run(messages, place=place, tools=conversation.tools, prompts=prompt, marks=marks)

    def _between_prefixes(self, conversation: Conversation, number: int, text: str) -> Span:
        message = conversation.messages[number]
        start = self._answer_start(conversation, number, text)
        through, _ = self._run(conversation, number + 1)
        end = len(through) if text.startswith(through) else _end_as_last(through, start, message, text)
        if end is None or end <= start:
            raise self._inseparable(conversation, number, "it renders earlier turns differently when later ones follow")
        if message.role != "assistant":  # the header of such a turn belongs neither to a prompt nor to the message
            start = max(start, self._words(conversation, number, text, start, end))
        said = text[start:end].rstrip()  # space after what closes the turn is not generated, unless it closes it
        return start, end if message.ends(said) else start + len(said)

    def _answer_start(self, conversation: Conversation, number: int, text: str) -> int:
        """Length of the text before a message, including its prompt as far as the text matches it."""
        spoken = conversation.messages[number].role == "assistant"
        before, _ = self._run(conversation, number, prompt=spoken) if number or spoken else ("", [])
        if text.startswith(before):
            return len(before)
        shared = _shared(before, text)
        bare, _ = self._run(conversation, number)
        if text.startswith(bare) and shared >= len(bare):
            return shared
        message = conversation.messages[number]
        if spoken and not next(message.without_reasoning(), None):  # else ``text`` may have the reasoning of this one
            # Another answer makes the conversation differ where this one begins.
            other = Message(role=message.role, content="B" if message.content.strip().startswith("A") else "A")
            messages = [*conversation.messages[:number], other, *conversation.messages[number + 1 :]]
            start = _shared(text, self._run(replace(conversation, messages=messages), len(messages))[0])
            if _THOUGHTS.sub("", text[:start]).startswith(_THOUGHTS.sub("", bare)):
                return start
        raise self._inseparable(conversation, number, "earlier messages are rendered differently when it follows")

    def _words(self, conversation: Conversation, number: int, text: str, start: int, end: int) -> int:
        """The start of a turn's words: the text before them stays the same if other words follow."""
        words = conversation.messages[number].content.strip()
        others = replace(conversation.messages[number], content="B" if words.startswith("A") else "A")
        messages = [*conversation.messages[:number], others]
        rendered, _ = self._run(replace(conversation, messages=messages), number + 1)
        place = next((at for at, (one, other) in enumerate(zip(text, rendered, strict=False)) if one != other), end)
        return place if text.startswith(words, place) else text.find(words, start, end)

    def _inseparable(self, conversation: Conversation, number: int, reason: str) -> TurnsInseparable:
        return TurnsInseparable(
            place=str(conversation.place), number=number + 1, origin=self._template.origin, reason=reason
        )


def _end_as_last(through: str, start: int, message: Message, text: str) -> int | None:
    """Return the end of a turn that is rendered differently if it is the last one; None if it cannot be determined.

    Args:
        through: the conversation rendered up to the turn, as if it were the last.
        start: start of the turn in both texts.
        message: message of the turn.
        text: the whole conversation, rendered.
    """
    words = start + len(text[start:]) - len(text[start:].lstrip())
    for cut in range(start, len(through)):  # some templates drop older reasoning
        if (
            text.startswith(through[cut : cut + _LOOK], words)
            and text.startswith(through[cut:], words)
            and message.is_contained_in(through[cut:])
        ):
            return words + len(through) - cut
    same = _shared(through, text)  # others end the conversation with an additional token
    said = message.words or next((call["function"]["name"] for call in reversed(message.calls)), "")
    whole = same >= through.rfind(said) + len(said) and message.is_contained_in(text[start:same])
    return same if said and whole and not message.ends(text[start:same].rstrip()) else None


def _shared(first: str, second: str) -> int:
    """Return the length of the common beginning of two texts, without a token's name that is not closed."""
    pairs = enumerate(zip(first, second, strict=False))
    count = next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
    opened = _OPENED.search(second[:count])
    return opened.start() if opened else count
