"""Chats as tokens: rendered by the template, with the mask of what is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.chat.conversation import ROLES, Conversation
from nxdt_core.data.chat.rendering import ReservedTokens, Span, end_of_turn
from nxdt_core.data.files.records import Place, UnusedFields
from nxdt_core.data.tokens import compact_dtype
from nxdt_core.protocols.dataset import DataReport, TokenCount
from nxdt_core.protocols.tokenizer import ChatTokenizer, LocatedIds
from nxdt_plugin_sft_chat.config import ChatConfig, Truncation
from nxdt_plugin_sft_chat.errors import ChatTooLong
from nxdt_plugin_sft_chat.rendering import Rendered, Renderer

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
    for number, span in enumerate(_message_spans(conversation, rendered)):
        part = _tokens(span, located)
        role = conversation.messages[number].role
        turn += role == "assistant"
        roles[part] = ROLES.index(role)
        turns[part] = turn if role == "assistant" else 0
    for span in rendered.learnt:
        trained[_tokens(span, located)] = True
    unused = (*conversation.unused, *rendered.ignored)
    return Encoded(place=conversation.place, ids=located.ids, trained=trained, roles=roles, turns=turns, unused=unused)


def _message_spans(conversation: Conversation, rendered: Rendered) -> Sequence[Span]:
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


_NAMES = (*ROLES, "template")
_TOO_LONG = "longer than a sequence"
_UNTRAINED = "nothing in them is trained"
_CUT_AWAY = "truncation removes all their trained tokens"
_REASONS = (_TOO_LONG, _UNTRAINED, _CUT_AWAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Conversations, each of at least two tokens and with at least one that is trained. Arrays alone, which processes
    can share."""

    tokens: NDArray[np.unsignedinteger]
    """[tokens]"""
    trained: NDArray[np.bool_]
    """[tokens] whether the token is learnt where it comes next."""
    starts: NDArray[np.int64]
    """[conversations + 1] place of the first token of each, and the number of all tokens."""
    roles: NDArray[np.int64]
    """[2, roles + 1] tokens of each role and of the template, and how many of them are trained."""
    turns: NDArray[np.int64]
    """[2, turns + 1] tokens of the assistant's first, second, … turns behind a 0, and how many of them are trained."""
    truncated: NDArray[np.int64]
    """[1] conversations that were cut."""
    left_out: NDArray[np.int64]
    """[reasons] conversations that are not among these."""
    unused_fields: NDArray[np.str_]
    """[fields] fields of records that nothing uses."""
    unused_counts: NDArray[np.int64]
    """[fields] records that have them."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[conversations] tokens of each."""
        return np.diff(self.starts)

    @property
    def report(self) -> DataReport:
        """Return statistics of them."""
        roles = zip(_NAMES, *self.roles.tolist(), strict=True)
        return DataReport(
            records=len(self),
            tokens=TokenCount(tokens=len(self.tokens), trained=int(self.roles[1].sum())),
            lengths=self.lengths,
            by_role={name: TokenCount(tokens=count, trained=trained) for name, count, trained in roles if count},
            by_turn=[TokenCount(tokens=count, trained=trained) for count, trained in self.turns.T[1:].tolist()],
            truncated=int(self.truncated[0]),
            left_out={reason: count for reason, count in zip(_REASONS, self.left_out.tolist(), strict=True) if count},
            unused=dict(zip(self.unused_fields.tolist(), self.unused_counts.tolist(), strict=True)),
        )


@dataclass(slots=True)
class _Counts:
    """Counts, by what the report has them by."""

    roles: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, len(_NAMES)), np.int64))
    turns: Counter[int] = field(default_factory=Counter)
    turns_trained: Counter[int] = field(default_factory=Counter)
    truncated: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, chat: Encoded) -> None:
        self.roles[0] += np.bincount(chat.roles, minlength=len(_NAMES))
        self.roles[1] += np.bincount(chat.roles[chat.trained], minlength=len(_NAMES))
        self.turns.update(_counted(chat.turns))
        self.turns_trained.update(_counted(chat.turns[chat.trained]))


def _counted(turns: NDArray[np.int16]) -> dict[int, int]:
    """Turn, without the 0 of text outside turns → tokens."""
    return {turn: int(count) for turn, count in enumerate(np.bincount(turns)) if turn and count}


def gather(
    encoded: Iterable[Encoded], *, seq_length: int, truncation: Truncation, vocab_size: int, unused: UnusedFields
) -> Chats:
    """Cut, drop or refuse what is too long, leave out what would train nothing, and put the rest end to end.

    A conversation of n tokens takes n - 1 places of a sequence: nothing follows its last token.

    Raises:
        ChatTooLong: one does not fit, and that is refused; lists all that do not.
        FieldsUnused: a record has fields that nothing uses, and ``unused`` refuses them.
    """
    tally = _Counts()
    parts: list[NDArray[np.unsignedinteger]] = []
    masks: list[NDArray[np.bool_]] = []
    dtype = compact_dtype(vocab_size)
    for chat, cut in _fitting(_counting(encoded, unused), seq_length + 1, truncation, tally):
        if not chat.trained[1:].any():
            tally.left_out[_CUT_AWAY if cut else _UNTRAINED] += 1
            continue
        tally.truncated += cut
        parts.append(chat.ids.astype(dtype))
        masks.append(chat.trained)
        tally.add(chat)
    turns = range(max(tally.turns, default=0) + 1)
    return Chats(
        tokens=np.concatenate(parts) if parts else np.empty(0, dtype),
        trained=np.concatenate(masks) if masks else np.empty(0, np.bool_),
        starts=np.cumsum([0, *map(len, parts)]),
        roles=tally.roles,
        turns=np.array([[counts[turn] for turn in turns] for counts in (tally.turns, tally.turns_trained)]),
        truncated=np.array([tally.truncated]),
        left_out=np.array([tally.left_out[reason] for reason in _REASONS]),
        unused_fields=np.array(list(unused.counts), np.str_),
        unused_counts=np.array(list(unused.counts.values()), np.int64),
    )


def _counting(encoded: Iterable[Encoded], unused: UnusedFields) -> Iterator[Encoded]:
    for chat in encoded:
        unused.add(chat.place, chat.unused)
        yield chat


def _fitting(
    encoded: Iterable[Encoded], most: int, truncation: Truncation, tally: _Counts
) -> Iterator[tuple[Encoded, bool]]:
    """The conversations that are kept, and whether they had to be cut."""
    first: Encoded | None = None
    count = longest = 0
    for chat in encoded:
        if len(chat) <= most:
            yield chat, False
            continue
        first, count, longest = first or chat, count + 1, max(longest, len(chat))
        if truncation == "drop":
            tally.left_out[_TOO_LONG] += 1
        elif truncation != "refuse":
            yield chat.cut(slice(0, most) if truncation == "keep_start" else slice(len(chat) - most, None)), True
    if first is not None and truncation == "refuse":
        raise ChatTooLong(place=str(first.place), tokens=len(first), seq_length=most - 1, count=count, longest=longest)
