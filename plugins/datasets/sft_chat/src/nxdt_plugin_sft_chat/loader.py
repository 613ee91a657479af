"""The dataloader ``sft-chat``: conversations as tokens, rendered by the template, with the mask of what is trained; and
as samples of one length, packed or each with padding behind it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import are_offsets, cached_arrays, digest, is_array
from nxdt_core.data.chat.conversation import ROLES, Conversation
from nxdt_core.data.chat.records import read_record
from nxdt_core.data.chat.rendering import ReservedTokens, Span, end_of_turn, runner_of
from nxdt_core.data.chat.templates import template_names
from nxdt_core.data.files.records import (
    BadRecords,
    Place,
    Record,
    RecordCounts,
    Records,
    UnusedFields,
    count_records,
    describe_unused,
)
from nxdt_core.data.files.splits import SplitRecords
from nxdt_core.data.mixture import mixed
from nxdt_core.data.packing import shuffled_bins
from nxdt_core.data.tokens import compact_dtype, padding_id
from nxdt_core.errors.base import one_of
from nxdt_core.errors.chats import TemplateMissing
from nxdt_core.errors.data import DataNeedsTokenizer
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import DataContext, DataReport, DatasetSplits, MapDataset, SplitName, TokenCount
from nxdt_core.protocols.tokenizer import LocatedIds
from nxdt_plugin_sft_chat.config import ChatConfig, Truncation
from nxdt_plugin_sft_chat.errors import ChatTooLong, EmptySplit, EverythingTrained, NothingTrained
from nxdt_plugin_sft_chat.rendering import Rendered, Renderer

_log = logging.getLogger(__name__)

TEMPLATE = len(ROLES)
"""Index of text of the template in :attr:`Encoded.roles`."""

_BATCH = 256
"""Conversations that the tokenizer gets at once: enough for the threads of its library."""


_NAMES = (*ROLES, "template")
_TOO_LONG = "longer than a sequence"
_UNTRAINED = "their marks leave nothing to train"
_CUT_AWAY = "truncation removes all their trained tokens"
_BAD = "they cannot be used"
_REASONS = (_TOO_LONG, _UNTRAINED, _CUT_AWAY, _BAD)
_PADDING = -1
"""Document number of padding."""
_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


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

    def cut(self, part: slice | NDArray[np.bool_]) -> Encoded:
        """Return the same with some of the tokens."""
        arrays = ("ids", "trained", "weights", "roles", "turns")
        return replace(self, **{name: getattr(self, name)[part] for name in arrays})


def _encoded(conversation: Conversation, rendered: Rendered, located: LocatedIds) -> Encoded:
    count = len(located.ids)
    trained = np.zeros(count, np.bool_)
    weights = np.ones(count, np.float32)
    roles = np.full(count, TEMPLATE, np.int8)
    turns = np.zeros(count, np.int16)
    turn = place = 0
    for number, message in enumerate(conversation.messages):
        # Exact for trained messages; the text of others is searched for in order.
        content = message.content.strip()
        at = rendered.text.find(content, place) if content else -1
        span = rendered.trained.get(number, (at, at + len(content)) if at >= 0 else (place, place))
        place = max(place, span[1])
        part = _tokens(span, located)
        weights[part] = message.weight
        turn += message.role == "assistant"
        roles[part] = ROLES.index(message.role)
        turns[part] = turn if message.role == "assistant" else 0
    for span in rendered.learnt:
        trained[_tokens(span, located)] = True
    return Encoded(
        place=conversation.place,
        ids=located.ids,
        trained=trained,
        weights=weights,
        roles=roles,
        turns=turns,
        unused=(*conversation.unused, *rendered.ignored),
    )


def _tokens(span: Span, located: LocatedIds) -> slice:
    """Tokens that have a character of ``span``, as transformers takes them for its mask of assistant tokens."""
    if span[0] == span[1]:
        return slice(0, 0)
    first = np.searchsorted(located.ends, span[0], side="right")
    return slice(int(first), int(np.searchsorted(located.starts, span[1], side="left")))


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
    counts: NDArray[np.str_]
    """[1] :class:`RecordCounts`."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def fits(self, most: int, vocab_size: int) -> bool:
        """Return whether the arrays agree, and each conversation has from 2 to ``most`` tokens of the vocabulary."""
        tokens = len(self.tokens)
        return (
            are_offsets(self.starts, tokens)
            and 2 <= self.lengths.min(initial=2) <= self.lengths.max(initial=2) <= most
            and is_array(self.tokens, "u", tokens)
            and self.tokens.max(initial=0) < vocab_size
            and is_array(self.trained, "b", tokens)
            and is_array(self.weights, "f", tokens if len(self.weights) else 0)
            and is_array(self.counts, "U", 1)
            and self.report is not None  # counts of another form raise a ValueError
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[conversations] tokens of each."""
        return np.diff(self.starts)

    @property
    def report(self) -> DataReport:
        """Return statistics of them."""
        tokens = TokenCount(tokens=len(self.tokens), trained=int(self.trained.sum()))
        return RecordCounts.of(self.counts).report(records=len(self), tokens=tokens, lengths=self.lengths)


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
    most, dtype = seq_length + 1, compact_dtype(vocab_size)
    tokens, masks = bytearray(), bytearray()  # which grow in place, where arrays would be held twice
    lengths: list[int] = []
    other_weights: dict[int, NDArray[np.float32]] = {}
    roles, turns, left_out = np.zeros((2, len(_NAMES)), np.int64), (Counter[int](), Counter[int]()), Counter[str]()
    first: Encoded | None = None
    too_long = longest = truncated = 0
    for chat in encoded:
        unused.add(chat.place, chat.unused)
        cut = len(chat) > most
        if cut:
            first, too_long, longest = first or chat, too_long + 1, max(longest, len(chat))
            if truncation in ("drop", "refuse"):
                left_out[_TOO_LONG] += truncation == "drop"
                continue
            chat = chat.cut(slice(0, most) if truncation == "keep_start" else slice(len(chat) - most, None))
        if not chat.trained[1:].any():
            left_out[_CUT_AWAY if cut else _UNTRAINED] += 1
            continue
        truncated += cut
        tokens += chat.ids.astype(dtype).tobytes()
        masks += chat.trained.tobytes()
        if (chat.weights != 1).any():
            other_weights[len(lengths)] = chat.weights
        lengths.append(len(chat))
        trained = chat.cut(chat.trained)
        for row, part in enumerate((chat, trained)):
            roles[row] += np.bincount(part.roles, minlength=len(_NAMES))
            turns[row].update(dict(enumerate(np.bincount(part.turns).tolist())))
    if first is not None and truncation == "refuse":
        place = str(first.place)
        raise ChatTooLong(place=place, tokens=len(first), seq_length=seq_length, count=too_long, longest=longest)
    left_out[_BAD] = bad.count
    starts = np.cumsum([0, *lengths])
    weights = np.ones(starts[-1] if other_weights else 0, np.float32)
    for number, values in other_weights.items():
        weights[starts[number] : starts[number + 1]] = values
    of_roles = zip(_NAMES, *roles.tolist(), strict=True)
    of_turns = ((turns[0][turn], turns[1][turn]) for turn in range(1, max(turns[0], default=0) + 1))
    counts = RecordCounts(
        truncated=truncated,
        left_out={reason: left_out[reason] for reason in _REASONS if left_out[reason]},
        bad=bad.reasons,
        unused=unused.counts,
        by_role={name: TokenCount(tokens=count, trained=trained) for name, count, trained in of_roles if count},
        by_turn=[TokenCount(tokens=count, trained=trained) for count, trained in of_turns],
    )
    return Chats(
        tokens=np.frombuffer(tokens, dtype),
        trained=np.frombuffer(masks, np.bool_),
        weights=weights,
        starts=starts,
        counts=counts.array(),
    )


class ChatDataset(MapDataset):
    """A map-style dataset of samples [seq_length].

    Args:
        chats: the conversations.
        samples: numbers of the conversations in each sample; None puts each conversation into its own sample.
        seq_length: tokens of a sample.
        pad_id: token for padding positions; they form a separate document and never have a loss.
        source: digest of everything that determines ``chats``.
        of_records: records of the files where ``chats`` are of the first ones.
    """

    def __init__(
        self,
        chats: Chats,
        samples: Sequence[NDArray[np.int64]] | None,
        *,
        seq_length: int,
        pad_id: int,
        source: str,
        of_records: int | None = None,
    ) -> None:
        self._chats = chats
        self._samples = list(np.arange(len(chats), dtype=np.int64)[:, None]) if samples is None else samples
        self._seq_length = seq_length
        self._pad_id = pad_id
        self._source = source
        self._of_records = of_records

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        length = self._seq_length
        ids = np.full(length, self._pad_id, np.int64)
        labels = np.full(length, IGNORE_INDEX, np.int64)
        positions = np.zeros(length, np.int64)
        documents = np.full(length, _PADDING, np.int64)
        weights = np.zeros(length, np.float32) if len(self._chats.weights) else None
        at = 0
        for number, chat in enumerate(self._samples[index]):
            begin, end = self._chats.starts[chat], self._chats.starts[chat + 1]
            tokens = self._chats.tokens[begin:end].astype(np.int64)
            until = at + len(tokens) - 1
            ids[at:until] = tokens[:-1]
            trained = self._chats.trained[begin + 1 : end]
            labels[at:until] = np.where(trained, tokens[1:], IGNORE_INDEX)
            if weights is not None:
                weights[at:until] = np.where(trained, self._chats.weights[begin + 1 : end], 0)
            positions[at:until] = np.arange(until - at)
            documents[at:until] = number
            at = until
        return Sample(
            input_ids=ids, labels=labels, loss_weights=weights, position_ids=positions, document_ids=documents
        )

    def fingerprint(self) -> str:
        """Return a digest of the conversations, and of how they are put into samples."""
        sizes = np.array([len(sample) for sample in self._samples], np.int64)
        return digest(self._source, self._seq_length, sizes, np.concatenate(self._samples))

    def report(self) -> DataReport:
        """Return a report of the conversations, and of the places that they fill."""
        filled = int(self._chats.lengths.sum()) - len(self._chats)
        efficiency = filled / (len(self) * self._seq_length)
        return replace(self._chats.report, efficiency=efficiency, of_records=self._of_records)


class ChatData(DatasetSplits):
    """Samples of conversations.

    Args:
        config: the keys.
        context: of the run.
        section: that has the keys of the files, for errors.

    Raises:
        DataNeedsTokenizer: the run has no tokenizer.
        NotAChatTokenizer: the tokenizer does not report the positions of tokens in a text.
        TemplateMissing, TemplateUnknown, TemplateNeedsToken: the chat template cannot be used.
    """

    def __init__(self, config: ChatConfig, context: DataContext, *, section: str = "data") -> None:
        if context.tokenizer is None:
            raise DataNeedsTokenizer(dataloader="sft-chat")
        chat_tokenizer = context.tokenizer
        chat_tokenizer.locate([])  # raises where it cannot
        self._config = config
        self._context = context
        self._sources = {
            name: ChatData(config.of_source(name), context, section=f"data.sources.{name}") for name in config.sources
        }
        self._tokenizer = context.tokenizer
        if self._sources:  # each has its own template
            return
        runner = runner_of(config, chat_tokenizer)
        if runner is None:
            raise TemplateMissing(known=template_names())
        self._renderer = Renderer(runner)
        self._reserved = ReservedTokens(chat_tokenizer, allowed=config.special_tokens_in_text)
        self._settings = runner.settings
        self._records = SplitRecords(config, example=_EXAMPLE, section=section, empty=EmptySplit, limit_in_digests=True)

    def split(self, name: SplitName) -> MapDataset | Mapping[str, MapDataset] | None:
        """Return the samples of a split; None where no files and no fraction are named for it. Several sources are
        mixed for training, and each is a set by its name for validation.

        Raises:
            NxdtError: of the files, their records and what the template makes of them; each names the place.
            NothingTrained, EverythingTrained: the loss would be on no token, or on all.
            MixtureInSequence: several sources are to be taken in their order.
        """
        if not self._sources:
            return self._of_files(name)
        of_sources = ((label, data._of_files(name)) for label, data in self._sources.items())
        datasets = {label: dataset for label, dataset in of_sources if dataset is not None}
        weights = {label: source.weight for label, source in self._config.sources.items()}
        if name == "train" and datasets:
            return mixed(datasets, weights, shuffle=self._context.shuffle)
        return datasets if len(datasets) > 1 else next(iter(datasets.values()), None)

    def _of_files(self, name: SplitName) -> ChatDataset | None:
        config, context = self._config, self._context
        chosen = self._records.of(name)
        if chosen is None:
            return None
        records, source = chosen
        decided: tuple[object, ...]
        decided = (config.train_roles, config.train_turns, config.truncation, config.special_tokens_in_text)
        if (config.bad_records, config.turn_order) != ("refuse", "refuse"):
            decided = (*decided, config.bad_records, config.turn_order)
        total, first = len(records), context.first_records
        records, source = (records, source) if first is None else (records[:first], digest(source, first))
        source = digest(source, self._tokenizer.fingerprint(), self._settings, decided)
        chats = self._chats(records, source)
        report = chats.report
        if not len(chats):
            reasons = [f"of {count} records, {reason}" for reason, count in report.left_out.items()]
            raise NothingTrained(place=f"the {name} data", reason="; ".join(reasons))
        if int(chats.trained.sum()) >= (labels := len(chats.tokens) - len(chats)):
            raise EverythingTrained(split=name, tokens=labels)
        for reason, count in report.left_out.items():
            _log.warning("%s data: left out %s: %s", name, count_records(count), reason)
        for reason in report.bad:
            _log.warning("%s data: left out: %s", name, reason)
        if report.truncated:
            _log.warning("%s data: cut %s to the sequence length", name, count_records(report.truncated))
        if report.unused:
            _log.warning("%s data: unused: %s", name, describe_unused(report.unused))
        return ChatDataset(
            chats,
            shuffled_bins(chats.lengths - 1, context.seq_length, seed=context.seed) if config.packing else None,
            seq_length=context.seq_length,
            pad_id=padding_id(self._tokenizer),
            source=source,
            of_records=total if len(records) < total else None,
        )

    def _chats(self, records: Records, source: str) -> Chats:
        """The records that fit, from the run's directory where they are there for the same ``source``."""
        length, directory = self._context.seq_length, self._config.cache_dir or self._context.cache_dir
        mode = self._config.unused_fields

        def chats() -> Chats:
            bad = BadRecords(self._config)
            return gather(
                self._encode(records, bad),
                bad,
                seq_length=length,
                truncation=self._config.truncation,
                vocab_size=self._tokenizer.vocab_size,
                unused=UnusedFields(mode),
            )

        name = f"chats-{digest(source, length, mode, self._config.max_bad_share)}"
        fits = partial(Chats.fits, most=length + 1, vocab_size=self._tokenizer.vocab_size)
        return cached_arrays(directory, name, Chats, chats, None, fits, most_bytes=self._config.cache_bytes)

    def _encode(self, records: Sequence[Record], bad: BadRecords) -> Iterator[Encoded]:
        """Yield the conversations of records in their order, without those that ``bad`` takes.

        Raises:
            NxdtError: of the template, or of a record that is refused.
        """
        end_of_turn(self._renderer.runner, self._tokenizer)
        usable = bad.usable(records, self._rendered)
        while batch := list(islice(usable, _BATCH)):
            located = self._tokenizer.locate([rendered.text for _, rendered in batch])
            yield from (_encoded(*pair, ids) for pair, ids in zip(batch, located, strict=True))

    def _rendered(self, record: Record) -> tuple[Conversation, Rendered]:
        place, content = record
        conversation = read_record(content, place, merge=self._config.turn_order == "merge")
        said = ((message.content, message.fields) for message in conversation.messages)
        self._reserved.check(said, str(place), tools=conversation.tools)
        messages = conversation.messages
        wanted = [i for i, message in enumerate(messages) if message.role in self._config.train_roles]
        if self._config.train_turns == "last":
            wanted = wanted[-1:]
        marks = [i in wanted if message.train is None else message.train for i, message in enumerate(messages)]
        rendered = self._renderer.render(conversation, [i for i, trained in enumerate(marks) if trained])
        marked = any(message.train is False for message in messages)
        if not marked and not any(start < end for start, end in rendered.learnt):
            roles = one_of(self._config.train_roles)
            raise NothingTrained(place=str(place), reason=f"there is no message of {roles} with text")
        return conversation, rendered
