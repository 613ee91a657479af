"""The dataloaders ``preference`` and ``unpaired-preference``: they read, render and cut a split's records when the run
starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import are_offsets, cached_arrays, digest, is_array
from nxdt_core.data.chat.rendering import runner_of
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
from nxdt_core.data.packing import shuffled_bins
from nxdt_core.data.tokens import compact_dtype, leading_ids, padding_id
from nxdt_core.errors import NxdtError
from nxdt_core.errors.data import DataNeedsTokenizer
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import DataContext, DataReport, DatasetSplits, MapDataset, SplitName, TokenCount
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_preference.config import PreferenceConfig, TruncationMode, UnpairedConfig
from nxdt_plugin_preference.errors import EmptySplit, LabelsAlike, NoRoomForAnswers, PairsCutAlike, PairTooLong
from nxdt_plugin_preference.objectives import PAIR, SCORES
from nxdt_plugin_preference.rendering import Pair, Preference, Renderer, read_preference, read_unpaired

ALIKE = "cut to the sequence length, both answers are the same"
_BAD = "they cannot be used"
_PADDING = -1
"""Document number of padding."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairArrays:
    """Pairs, or answers apart from each other, as arrays alone, which processes can share."""

    tokens: NDArray[np.unsignedinteger]
    """[tokens] of each pair's prompt, chosen answer and rejected answer; of each prompt and answer."""
    starts: NDArray[np.int64]
    """[3 × pairs + 1] or [2 × answers + 1] place of the first token of each part, and the number of all tokens."""
    others: NDArray[np.int64]
    """[answers] number of the one whose answer is in the second row; empty of pairs."""
    scores: NDArray[np.float32]
    """[pairs] margins, or [answers] 1 where it is desirable, else −1."""
    counts: NDArray[np.str_]
    """[1] :class:`RecordCounts`."""
    settings: NDArray[np.str_]
    """[1] digest of what decided how the records were rendered."""

    def __len__(self) -> int:
        return len(self.scores)

    def fits(self, unpaired: bool, vocab_size: int) -> bool:
        """Return whether the arrays agree, as those of answers ``unpaired`` from each other or of pairs, and all tokens
        are of the vocabulary."""
        pairs = len(self.scores)
        return (
            are_offsets(self.starts, len(self.tokens))
            and is_array(self.starts, "i", (2 if unpaired else 3) * pairs + 1)
            and is_array(self.others, "i", pairs if unpaired else 0)
            and 0 <= self.others.min(initial=0) <= self.others.max(initial=0) < max(pairs, 1)
            and self.lengths.min(initial=1) > 0
            and is_array(self.tokens, "u", len(self.tokens))
            and self.tokens.max(initial=0) < vocab_size
            and is_array(self.scores, "f", pairs)
            and is_array(self.counts, "U", 1)
            and self.report is not None  # counts of another form raise a ValueError
            and is_array(self.settings, "U", 1)
        )

    def parts(self, pair: int) -> list[NDArray[np.int64]]:
        """Return the tokens of the prompt and of the answers of both rows."""
        numbers = (3 * pair, 3 * pair + 1, 3 * pair + 2)
        if len(self.others):
            numbers = (2 * pair, 2 * pair + 1, 2 * int(self.others[pair]) + 1)
        return [self.tokens[self.starts[at] : self.starts[at + 1]].astype(np.int64) for at in numbers]

    @property
    def _sizes(self) -> NDArray[np.int64]:
        """[parts, pairs] tokens of the prompts and of the answers."""
        return np.diff(self.starts).reshape(-1, 2 if len(self.others) else 3).T

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[pairs, 2] tokens of the prompt with the answer of each row."""
        prompt, first, *second = self._sizes
        return np.stack([prompt + first, prompt + (second[0] if second else first[self.others])], axis=1)

    @property
    def report(self) -> DataReport:
        """Return statistics of them; the length of a pair is that of its longer row."""
        prompt, *answers = self._sizes
        lengths = np.stack([prompt + answer for answer in answers])
        tokens = TokenCount(tokens=int(lengths.sum()), trained=int(np.sum(answers)))
        return RecordCounts.of(self.counts).report(records=len(self), tokens=tokens, lengths=lengths.max(axis=0))


def gather(
    pairs: Iterable[Pair],
    bad: BadRecords,
    unused: UnusedFields,
    settings: Callable[[], str],
    *,
    vocab_size: int,
    unpaired: bool = False,
) -> PairArrays:
    """Put the pairs whose answers differ end to end, or all answers ``unpaired`` from each other.

    ``bad`` and ``unused`` count while ``pairs`` are made, after which ``settings`` knows what decided them."""
    dtype = compact_dtype(vocab_size)
    tokens = bytearray()  # which grows in place, where arrays would be held twice
    lengths: list[int] = []
    scores: list[float] = []
    of_records: list[range] = []
    alike = truncated = 0
    for pair in pairs:
        if not unpaired and pair.answers[0] == pair.answers[1]:
            alike += 1
            continue
        entries = [(pair.prompt, answer) for answer in pair.answers] if unpaired else [(pair.prompt, *pair.answers)]
        of_records.append(range(len(scores), len(scores) + len(entries)))
        for part in (part for entry in entries for part in entry):
            tokens += np.array(part, dtype).tobytes()
            lengths.append(len(part))
        truncated += pair.cut * len(entries)
        scores += pair.scores or [0.0]
    # Rotated by a record, so that the answers of the second rows are those of the first (TRL's estimate of the KL).
    around = zip(of_records, [*of_records[-1:], *of_records], strict=False) if unpaired else ()
    others = [before[place % len(before)] for record, before in around for place in range(len(record))]
    return PairArrays(
        tokens=np.frombuffer(tokens, dtype),
        starts=np.cumsum([0, *lengths]),
        others=np.array(others, np.int64),
        scores=np.array(scores, np.float32),
        counts=RecordCounts(
            truncated=truncated,
            left_out={reason: count for reason, count in ((ALIKE, alike), (_BAD, bad.count)) if count},
            bad=bad.reasons,
            unused=unused.counts,
        ).array(),
        settings=np.array([settings()]),
    )


class PairDataset(MapDataset):
    """A map-style dataset of samples [2, seq_length].

    ``labels`` are those of prompt and answer; ``loss_weights`` say which are the answer's, and the value
    ``answer_scores`` its margin or label. Answers of one pair have the same document number.

    Args:
        pairs: prompts that have at most ``seq_length`` tokens with their own answers.
        packs: numbers of the pairs in each sample, which fit into its rows. None puts each pair into its own sample,
            without document numbers: no token attends to the padding after it.
        seq_length: tokens of a row.
        pad_id: token after the last pair.
        source: digest of the data that the pairs were made from.
        of_records: records of the files where ``pairs`` are of the first ones.
    """

    def __init__(
        self,
        pairs: PairArrays,
        packs: Sequence[NDArray[np.int64]] | None = None,
        *,
        seq_length: int,
        pad_id: int,
        source: str,
        of_records: int | None = None,
    ) -> None:
        self._pairs = pairs
        self._packs = packs
        self._scored = bool(pairs.scores.any())
        self._seq_length = seq_length
        self._pad_id = pad_id
        self._source = source
        self._of_records = of_records

    def __len__(self) -> int:
        return len(self._pairs if self._packs is None else self._packs)

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shape = PAIR, self._seq_length
        ids, labels = np.full(shape, self._pad_id, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        weights, positions = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
        documents, scores = np.full(shape, _PADDING, np.int64), np.zeros(shape, np.float32)
        ends = [0] * PAIR
        for number, place in enumerate([index] if self._packs is None else self._packs[index]):
            prompt, *answers = self._pairs.parts(int(place))
            for row, answer in enumerate(answers):
                tokens = np.concatenate([prompt, answer])[: self._seq_length]
                begin, end = ends[row], ends[row] + len(tokens)
                ids[row, begin:end] = tokens
                labels[row, begin : end - 1] = tokens[1:]
                weights[row, begin + max(0, len(prompt) - 1) : end - 1] = 1
                positions[row, begin:end] = np.arange(end - begin)
                documents[row, begin:end] = number
                if row == 0 or not len(self._pairs.others):
                    scores[row, begin:end] = self._pairs.scores[place]
                ends[row] = end
        packed = self._packs is not None
        return Sample(
            input_ids=ids,
            labels=labels,
            loss_weights=weights,
            position_ids=positions if packed else None,
            document_ids=documents if packed else None,
            padding=documents < 0,
            values={SCORES: scores} if self._scored else {},
        )

    def fingerprint(self) -> str:
        """Digest of the records, of how they were rendered, cut and put together, and of the sequence length."""
        return self._source if self._packs is None else digest(self._source, *self._packs)

    def report(self) -> DataReport:
        """Return a report of the pairs, and of the places that they fill; of answers apart, in the first row."""
        report, rows = self._pairs.report, 1 if len(self._pairs.others) else PAIR
        places = len(self) * rows * self._seq_length
        return replace(report, efficiency=report.tokens.tokens / places, of_records=self._of_records)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedPairs:
    """Truncation of pairs that are longer than a sequence.

    Raises:
        NoRoomForAnswers: a prompt that is cut leaves no answer.
    """

    seq_length: int
    max_prompt_length: int
    mode: TruncationMode

    def __post_init__(self) -> None:
        if self.max_prompt_length >= self.seq_length:
            raise NoRoomForAnswers(prompt=self.max_prompt_length, sequence=self.seq_length)

    def fit(self, pair: Pair, place: Place) -> Pair:
        """Return as much of the prompt, then of the answers, as a sequence holds; ``pair`` itself where that is all.

        Raises:
            PairTooLong: that is refused, or what may not be cut of the prompt leaves no room for answers.
        """
        if pair.length <= self.seq_length:
            return pair
        room = max(self.max_prompt_length, self.seq_length - max(map(len, pair.answers)), pair.header)
        room = min(room, len(pair.prompt))
        left = self.seq_length - room
        if self.mode == "refuse" or left < 1:
            raise PairTooLong(place=str(place), tokens=pair.length, seq_length=self.seq_length)
        start, end = (room - pair.header, pair.header) if self.mode == "keep_start" else (0, room)
        prompt = [*pair.prompt[:start], *pair.prompt[len(pair.prompt) - end :]]
        return replace(pair, prompt=prompt, answers=tuple(answer[:left] for answer in pair.answers), cut=True)


class PreferenceData(DatasetSplits):
    """Pairs of answers.

    Raises:
        DataNeedsTokenizer: the run has no tokenizer.
        NoRoomForAnswers: a prompt may be as long as a sequence.
    """

    kind: ClassVar[str] = "preference"
    _unpaired: ClassVar[bool] = False
    example: ClassVar[str] = '{"prompt": "...", "chosen": "...", "rejected": "..."}'

    def __init__(self, config: UnpairedConfig, context: DataContext) -> None:
        if context.tokenizer is None:
            raise DataNeedsTokenizer(dataloader=self.kind)
        self._config = config
        self._margins = isinstance(config, PreferenceConfig) and config.margins
        self._context = context
        self._tokenizer: Tokenizer = context.tokenizer
        self._records = SplitRecords(config, example=self.example, empty=EmptySplit)
        limit = config.max_prompt_length
        self._fitting = TruncatedPairs(
            seq_length=context.seq_length,
            max_prompt_length=context.seq_length // 2 if limit is None else limit,
            mode=config.truncation_mode,
        )

    def split(self, name: SplitName) -> PairDataset | None:
        """Return the pairs of a split; None where no files and no share are named for it.

        Raises:
            NxdtError: of the files and the chat template, or of a record, with its file and line.
            EmptySplit, PairsCutAlike: no pair is left.
        """
        chosen = self._records.of(name)
        if chosen is None:
            return None
        records, source = chosen
        total, records = len(records), records[: self._context.first_records]
        pairs = self._pairs(records, source)
        seq_length, report = self._fitting.seq_length, pairs.report
        for reason in report.bad:
            _log.warning("%s data: left out: %s", name, reason)
        if not len(pairs):
            raise PairsCutAlike(seq_length=seq_length, pairs=report.left_out.get(ALIKE, 0), split=name)
        if left_out := report.left_out.get(ALIKE):
            _log.warning("%s data: left out %s: %s", name, count_records(left_out), ALIKE)
        if report.truncated:
            _log.warning("data.%s_files: %d of %d pairs do not fit and were cut", name, report.truncated, len(pairs))
        if self._unpaired and name == "train" and len(records) == total and len(set(pairs.scores.tolist())) == 1:
            raise LabelsAlike(split=name, records=len(pairs), label="true" if pairs.scores[0] > 0 else "false")
        if report.unused:
            _log.warning("%s data: unused: %s", name, describe_unused(report.unused))
        return PairDataset(
            pairs,
            shuffled_bins(np.minimum(pairs.lengths, seq_length), seq_length, seed=self._context.seed)
            if self._config.packing
            else None,
            seq_length=seq_length,
            pad_id=padding_id(self._tokenizer),
            source=digest(*self._what, source, str(pairs.settings[0]), self._fitting, len(pairs)),
            of_records=total if len(records) < total else None,
        )

    def _pairs(self, records: Records, source: str) -> PairArrays:
        """The pairs of records, from a cache where they are there for the same ``source`` and settings."""
        config, directory = self._config, self._config.cache_dir or self._context.cache_dir

        def pairs() -> PairArrays:
            renderer = Renderer(self._tokenizer, config)
            unused, bad = UnusedFields(config.unused_fields), BadRecords(config)

            def fitted(record: Record) -> tuple[Place, Pair]:
                place, content = record
                return place, self._fitting.fit(renderer.render(self._read_record(content, place)), place)

            def counted() -> Iterator[Pair]:
                for place, pair in bad.usable(records, fitted):
                    unused.add(place, pair.unused)
                    yield pair

            vocab_size = self._tokenizer.vocab_size
            return gather(counted(), bad, unused, renderer.fingerprint, vocab_size=vocab_size, unpaired=self._unpaired)

        try:
            runner = runner_of(config, self._tokenizer)
        except NxdtError:  # of which records of messages say more
            runner = None
        texts = leading_ids(self._tokenizer, add_bos=config.add_bos), config.special_tokens_in_text
        decided = (len(records), texts, config.space_after_turns, config.unused_fields)
        policy = (config.bad_records, config.max_bad_share, config.turn_order, runner and runner.settings)
        name = digest(source, self._tokenizer.fingerprint(), decided, policy, self._fitting, *self._what)
        fits = partial(PairArrays.fits, unpaired=self._unpaired, vocab_size=self._tokenizer.vocab_size)
        return cached_arrays(directory, f"pairs-{name}", PairArrays, pairs, None, fits, most_bytes=config.cache_bytes)

    @property
    def _what(self) -> tuple[str, ...]:
        """Return what the samples are, for their fingerprint."""
        return (self.kind, "margins") if self._margins else (self.kind,)

    def _read_record(self, record: Mapping[str, Any], place: Place) -> Preference:
        return read_preference(record, place, merge=self._config.turn_order == "merge", margins=self._margins)


class UnpairedData(PreferenceData):
    """Answers apart from each other, each desirable or not; the second row of a sample is its prompt with the answer of
    another record.

    Raises:
        DataNeedsTokenizer, NoRoomForAnswers: as of :class:`PreferenceData`.
    """

    kind = "unpaired-preference"
    _unpaired = True
    example = '{"prompt": "...", "completion": "...", "label": true}'

    def _read_record(self, record: Mapping[str, Any], place: Place) -> Preference:
        return read_unpaired(record, place, merge=self._config.turn_order == "merge")
