"""Conversations → token ids, which of them the loss is on, and whose words they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.chat.conversation import ROLES, Conversation
from nxdt_core.data.chat.rendering import ReservedTokens, Span, end_of_turn
from nxdt_core.data.files.records import Place
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
        return replace(
            self, ids=self.ids[part], trained=self.trained[part], roles=self.roles[part], turns=self.turns[part]
        )


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

    def encode(self, conversations: Iterable[Conversation]) -> Iterator[Encoded]:
        """Yield the conversations in their order.

        Raises:
            SpecialTokenInText: a text would become a special token.
            TemplateNeedsToken: what ends a turn would become several tokens.
            TemplateUnreadable, TemplateRefuses, TurnsInseparable, EndOfTurnUntrained: as they say.
        """
        end_of_turn(self._renderer.runner, self._tokenizer)
        remaining = iter(conversations)
        while batch := list(islice(remaining, _BATCH)):
            rendered = [self._rendered(conversation) for conversation in batch]
            located = self._tokenizer.locate([each.text for each in rendered])
            yield from map(_encoded, batch, rendered, located)

    def _rendered(self, conversation: Conversation) -> Rendered:
        said = ((message.content, message.fields) for message in conversation.messages)
        self._reserved.check(said, str(conversation.place), tools=conversation.tools)
        return self._renderer.render(conversation, trained_messages(conversation, self._config))


def _encoded(conversation: Conversation, rendered: Rendered, located: LocatedIds) -> Encoded:
    count = len(located.ids)
    trained = np.zeros(count, np.bool_)
    roles = np.full(count, TEMPLATE, np.int8)
    turns = np.zeros(count, np.int16)
    turn = 0
    for number, span in enumerate(_spoken(conversation, rendered)):
        part = _tokens(span, located)
        role = conversation.messages[number].role
        turn += role == "assistant"
        roles[part] = ROLES.index(role)
        turns[part] = turn if role == "assistant" else 0
    for span in rendered.learnt:
        trained[_tokens(span, located)] = True
    unused = (*conversation.unused, *rendered.ignored)
    return Encoded(place=conversation.place, ids=located.ids, trained=trained, roles=roles, turns=turns, unused=unused)


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
