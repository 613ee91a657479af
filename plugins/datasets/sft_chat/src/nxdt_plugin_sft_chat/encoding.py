"""Conversations → token ids, which of them the loss is on, and whose words they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.chat.conversation import ROLES, Conversation
from nxdt_core.data.chat.records import read_record
from nxdt_core.data.chat.rendering import ReservedTokens, Span, end_of_turn
from nxdt_core.data.files.records import BadRecords, Place, Record
from nxdt_core.protocols.tokenizer import ChatTokenizer, LocatedIds
from nxdt_plugin_sft_chat.config import ChatConfig
from nxdt_plugin_sft_chat.rendering import Rendered, Renderer

__all__ = ["TEMPLATE", "Encoded", "Encoder", "trained_messages"]

TEMPLATE = len(ROLES)
"""In :attr:`Encoded.roles`: text of the template."""

_BATCH = 256
"""Conversations that the tokenizer gets at once: enough for the threads of its library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One conversation; arrays of [tokens]."""

    place: Place
    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]
    """Whether the token is learnt where it comes next."""
    weights: NDArray[np.float32]
    """Weight of the token in the loss; 1 where no message says otherwise."""
    roles: NDArray[np.int8]
    """Index in :data:`ROLES` of who says it, or :data:`TEMPLATE`."""
    turns: NDArray[np.int16]
    """Of an assistant's token: the number of the turn, from 1; elsewhere 0."""
    unused: tuple[str, ...] = ()
    """Fields of the record that the tokens do not depend on."""

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, part: slice) -> Encoded:
        """Return the same with fewer tokens."""
        arrays = ("ids", "trained", "weights", "roles", "turns")
        return replace(self, **{name: getattr(self, name)[part] for name in arrays})


def trained_messages(conversation: Conversation, config: ChatConfig) -> list[int]:
    """Numbers, from 0, of the messages that the loss is on."""
    messages = conversation.messages
    wanted = [i for i, message in enumerate(messages) if message.role in config.train_roles]
    if config.train_turns == "last":
        wanted = wanted[-1:]
    return [i for i, message in enumerate(messages) if (i in wanted if message.train is None else message.train)]


class Encoder:
    """Encodes conversations with one template and one tokenizer."""

    def __init__(self, renderer: Renderer, tokenizer: ChatTokenizer, config: ChatConfig) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._config = config
        self._reserved = ReservedTokens(tokenizer, allowed=config.special_tokens_in_text)

    def encode(self, records: Sequence[Record], bad: BadRecords) -> Iterator[Encoded]:
        """Yield the conversations of records in their order, without those that ``bad`` takes.

        Raises:
            NxdtError: of a record that is refused, such as:
            SpecialTokenInText: a text would become a special token.
            TemplateNeedsToken: what ends a turn would become several tokens.
            TemplateUnreadable, TemplateRefuses, TurnsInseparable, EndOfTurnUntrained: as they say.
        """
        end_of_turn(self._renderer.runner, self._tokenizer)
        usable = bad.usable(records, self._rendered)
        while batch := list(islice(usable, _BATCH)):
            located = self._tokenizer.locate([rendered.text for _, rendered in batch])
            yield from (_encoded(*each, ids) for each, ids in zip(batch, located, strict=True))

    def _rendered(self, record: Record) -> tuple[Conversation, Rendered]:
        place, content = record
        conversation = read_record(content, place, merge=self._config.turn_order == "merge")
        said = ((message.content, message.fields) for message in conversation.messages)
        self._reserved.check(said, str(place), tools=conversation.tools)
        return conversation, self._renderer.render(conversation, trained_messages(conversation, self._config))


def _encoded(conversation: Conversation, rendered: Rendered, located: LocatedIds) -> Encoded:
    count = len(located.ids)
    trained = np.zeros(count, np.bool_)
    weights = np.ones(count, np.float32)
    roles = np.full(count, TEMPLATE, np.int8)
    turns = np.zeros(count, np.int16)
    turn = 0
    for number, span in enumerate(_spoken(conversation, rendered)):
        part = _tokens(span, located)
        role = conversation.messages[number].role
        weights[part] = conversation.messages[number].weight
        turn += role == "assistant"
        roles[part] = ROLES.index(role)
        turns[part] = turn if role == "assistant" else 0
    for span in rendered.learnt:
        trained[_tokens(span, located)] = True
    unused = (*conversation.unused, *rendered.ignored)
    return Encoded(
        place=conversation.place,
        ids=located.ids,
        trained=trained,
        weights=weights,
        roles=roles,
        turns=turns,
        unused=unused,
    )


def _spoken(conversation: Conversation, rendered: Rendered) -> Sequence[Span]:
    """The position of each message's text: exact for trained messages, otherwise found by searching in order."""
    spans, place = [], 0
    for number, message in enumerate(conversation.messages):
        content = message.content.strip()
        at = rendered.text.find(content, place) if content else -1
        span = rendered.trained.get(number, (at, at + len(content)) if at >= 0 else (place, place))
        spans.append(span)
        place = max(place, span[1])
    return spans


def _tokens(span: Span, located: LocatedIds) -> slice:
    """Tokens that have a character of ``span``, as transformers takes them for its mask of assistant tokens."""
    if span[0] == span[1]:
        return slice(0, 0)
    first = np.searchsorted(located.ends, span[0], side="right")
    return slice(int(first), int(np.searchsorted(located.starts, span[1], side="left")))
