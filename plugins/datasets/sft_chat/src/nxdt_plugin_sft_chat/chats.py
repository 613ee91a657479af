"""Chats as tokens: rendered by the template, with the mask of what is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import are_offsets, is_array
from nxdt_core.data.chat.conversation import ROLES, Conversation
from nxdt_core.data.chat.records import read_record
from nxdt_core.data.chat.rendering import ReservedTokens, Span, end_of_turn
from nxdt_core.data.files.records import BadRecords, Place, Record, UnusedFields
from nxdt_core.data.tokens import compact_dtype
from nxdt_core.errors.base import one_of
from nxdt_core.protocols.dataset import DataReport, TokenCount
from nxdt_core.protocols.tokenizer import LocatedIds, Tokenizer
from nxdt_plugin_sft_chat.config import ChatConfig, Truncation
from nxdt_plugin_sft_chat.errors import ChatTooLong, NothingTrained
from nxdt_plugin_sft_chat.rendering import Rendered, Renderer

TEMPLATE = len(ROLES)
"""Index of text of the template in :attr:`Encoded.roles`."""

_BATCH = 256
"""Conversations that the tokenizer gets at once: enough for the threads of its library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One conversation; arrays of [tokens]."""

    place: Place
    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]
    """True for each token that is learnt as the label of the one before."""
    weights: NDArray[np.float32]
    """Weight of the token in the loss; 1 where no message says otherwise."""
    roles: NDArray[np.int8]
    """Index in :data:`ROLES` of who says it, or :data:`TEMPLATE`."""
    turns: NDArray[np.int16]
    """Number of the turn, from 1, for tokens of an assistant; 0 elsewhere."""
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

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, config: ChatConfig) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._config = config
        self._reserved = ReservedTokens(tokenizer, allowed=config.special_tokens_in_text)

    def encode(self, records: Sequence[Record], bad: BadRecords) -> Iterator[Encoded]:
        """Yield the conversations of records in their order, without those that ``bad`` takes.

        Raises:
            NxdtError: of a record that is refused, such as:
            NothingTrained: it has no answer, and no mark of ``train: false`` or ``weight: 0`` leaves it out.
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
        rendered = self._renderer.render(conversation, trained_messages(conversation, self._config))
        marked = any(message.train is False for message in conversation.messages)
        if not marked and not any(start < end for start, end in rendered.learnt):
            roles = one_of(self._config.train_roles)
            raise NothingTrained(place=str(place), reason=f"there is no message of {roles} with text")
        return conversation, rendered


def _encoded(conversation: Conversation, rendered: Rendered, located: LocatedIds) -> Encoded:
    count = len(located.ids)
    trained = np.zeros(count, np.bool_)
    weights = np.ones(count, np.float32)
    roles = np.full(count, TEMPLATE, np.int8)
    turns = np.zeros(count, np.int16)
    turn = 0
    for number, span in enumerate(_message_spans(conversation, rendered)):
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
_UNTRAINED = "their marks leave nothing to train"
_CUT_AWAY = "truncation removes all their trained tokens"
_BAD = "they cannot be used"
_REASONS = (_TOO_LONG, _UNTRAINED, _CUT_AWAY, _BAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Conversations, each of at least two tokens and with at least one that is trained. Arrays alone, which processes
    can share."""

    tokens: NDArray[np.unsignedinteger]
    """[tokens]"""
    trained: NDArray[np.bool_]
    """[tokens] whether the token is learnt where it comes next."""
    weights: NDArray[np.float32]
    """[tokens] weight of the token in the loss; [0] where all are 1."""
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
    bad: NDArray[np.str_]
    """[records] place and reason of the first records that cannot be used."""
    unused_fields: NDArray[np.str_]
    """[fields] fields of records that nothing uses."""
    unused_counts: NDArray[np.int64]
    """[fields] records that have them."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def fits(self, most: int, vocab_size: int) -> bool:
        """Return whether the arrays agree, and each conversation has from 2 to ``most`` tokens of the vocabulary."""
        tokens, unused = len(self.tokens), len(self.unused_fields)
        return (
            are_offsets(self.starts, tokens)
            and 2 <= self.lengths.min(initial=2) <= self.lengths.max(initial=2) <= most
            and is_array(self.tokens, "u", tokens)
            and self.tokens.max(initial=0) < vocab_size
            and is_array(self.trained, "b", tokens)
            and is_array(self.weights, "f", tokens if len(self.weights) else 0)
            and is_array(self.roles, "i", 2, len(_NAMES))
            and is_array(self.turns, "i", 2, self.turns.shape[-1])
            and is_array(self.truncated, "i", 1)
            and is_array(self.left_out, "i", len(_REASONS))
            and is_array(self.bad, "U", len(self.bad))
            and is_array(self.unused_fields, "U", unused)
            and is_array(self.unused_counts, "i", unused)
        )

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
            bad=self.bad.tolist(),
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
    encoded: Iterable[Encoded],
    bad: BadRecords,
    *,
    seq_length: int,
    truncation: Truncation,
    vocab_size: int,
    unused: UnusedFields,
) -> Chats:
    """Cut, drop or refuse what is too long, leave out what would train nothing, and put the rest end to end.

    ``bad`` counts the records that ``encoded`` leaves out.

    A conversation of n tokens takes n - 1 places of a sequence: nothing follows its last token.

    Raises:
        ChatTooLong: one does not fit, and that is refused; lists all that do not.
        FieldsUnused: a record has fields that nothing uses, and ``unused`` refuses them.
    """
    tally = _Counts()
    tokens, masks = bytearray(), bytearray()  # which grow in place, where arrays would be held twice
    lengths: list[int] = []
    weights: dict[int, NDArray[np.float32]] = {}
    dtype = compact_dtype(vocab_size)
    for chat, cut in _fitting(_counting(encoded, unused), seq_length + 1, truncation, tally):
        if not chat.trained[1:].any():
            tally.left_out[_CUT_AWAY if cut else _UNTRAINED] += 1
            continue
        tally.truncated += cut
        tokens += chat.ids.astype(dtype).tobytes()
        masks += chat.trained.tobytes()
        if (chat.weights != 1).any():
            weights[len(lengths)] = chat.weights
        lengths.append(len(chat))
        tally.add(chat)
    tally.left_out[_BAD] = bad.count
    starts = np.cumsum([0, *lengths])
    turns = range(max(tally.turns, default=0) + 1)
    return Chats(
        tokens=np.frombuffer(tokens, dtype),
        trained=np.frombuffer(masks, np.bool_),
        weights=_weights(weights, starts),
        starts=starts,
        roles=tally.roles,
        turns=np.array([[counts[turn] for turn in turns] for counts in (tally.turns, tally.turns_trained)]),
        truncated=np.array([tally.truncated]),
        left_out=np.array([tally.left_out[reason] for reason in _REASONS]),
        bad=np.array(bad.reasons, np.str_),
        unused_fields=np.array(list(unused.counts), np.str_),
        unused_counts=np.array(list(unused.counts.values()), np.int64),
    )


def _weights(given: Mapping[int, NDArray[np.float32]], starts: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the weights of all tokens, of which some conversations have other ones than 1; nothing where none has."""
    weights = np.ones(starts[-1] if given else 0, np.float32)
    for number, own in given.items():
        weights[starts[number] : starts[number + 1]] = own
    return weights


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
