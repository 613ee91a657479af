"""The dataloaders ``preference`` and ``unpaired-preference``: they read, render and cut a split's records when the run
starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from nxdt_core.data.cache import cached_arrays, digest
from nxdt_core.data.chat.rendering import runner_of
from nxdt_core.data.files.records import (
    BadRecords,
    Place,
    Record,
    Records,
    UnusedFields,
    count_records,
    describe_unused,
)
from nxdt_core.data.files.splits import SplitRecords
from nxdt_core.data.packing import shuffled_bins
from nxdt_core.data.tokens import leading_ids, padding_id
from nxdt_core.errors import NxdtError
from nxdt_core.errors.data import DataNeedsTokenizer
from nxdt_core.protocols.dataset import DataContext, DatasetSplits, SplitName
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_preference.config import PreferenceConfig, TruncationMode, UnpairedConfig
from nxdt_plugin_preference.dataset import ALIKE, PairArrays, PairDataset, gather
from nxdt_plugin_preference.errors import EmptySplit, LabelsAlike, NoRoomForAnswers, PairsCutAlike, PairTooLong
from nxdt_plugin_preference.records import Preference, read_preference, read_unpaired
from nxdt_plugin_preference.rendering import Pair, Renderer


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


_log = logging.getLogger(__name__)


class PreferenceData(DatasetSplits):
    """Pairs of answers.

    Raises:
        DataNeedsTokenizer: the run has no tokenizer.
        NoRoomForAnswers: a prompt may be as long as a sequence.
    """

    kind: ClassVar[str] = "preference"
    _apart: ClassVar[bool] = False
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
            NxdtError: of the files, as of :func:`~nxdt_core.data.files.records.read_records`.
            NotAChatTokenizer, TemplateMissing, TemplateUnknown, TemplateNeedsToken, TemplateUnreadable: of messages.
            AnswerMissing, AnswerEmpty, AnswersEqual, AnswerOfOthers, PromptMissing, PromptDiffers, BadPreference,
            BadMessage, UnknownRole, RolesOutOfOrder, EmptyTurn, TemplateRefuses, AnswersInseparable,
            SpecialTokenInText, PairTooLong: of a record; each names the file and the line.
            EmptySplit, PairsCutAlike: no pair is left.
            FieldsUnused: a record has fields that nothing uses, and the configuration refuses them.
        """
        chosen = self._records.of(name)
        return None if chosen is None else self._dataset(*chosen, name)

    def _dataset(self, records: Records, source: str, name: SplitName) -> PairDataset:
        """The pairs of a split's records, of which ``source`` is a digest."""
        found, records = len(records), records[: self._context.first_records]
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
        if self._apart and name == "train" and len(records) == found and len(set(pairs.scores.tolist())) == 1:
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
            of_records=found if len(records) < found else None,
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
            return gather(counted(), bad, unused, renderer.fingerprint, vocab_size=vocab_size, apart=self._apart)

        if directory is None:
            return pairs()
        texts = leading_ids(self._tokenizer, add_bos=config.add_bos), config.special_tokens_in_text
        decided = (len(records), texts, config.space_after_turns, config.unused_fields)
        policy = (config.bad_records, config.max_bad_share, config.turn_order, self._template())
        name = digest(source, self._tokenizer.fingerprint(), decided, policy, self._fitting, *self._what)
        fits = partial(PairArrays.fits, apart=self._apart, vocab_size=self._tokenizer.vocab_size)
        return cached_arrays(
            directory, f"pairs-{name}", PairArrays, pairs, _unkept, fits, most_bytes=config.cache_bytes
        )

    @property
    def _what(self) -> tuple[str, ...]:
        """Return what the samples are, for their fingerprint."""
        return (self.kind, "margins") if self._margins else (self.kind,)

    def _read_record(self, record: Mapping[str, Any], place: Place) -> Preference:
        return read_preference(record, place, merge=self._config.turn_order == "merge", margins=self._margins)

    def _template(self) -> object:
        """Return everything that decides what messages become; None where no message could be rendered."""
        try:
            runner = runner_of(self._config, self._tokenizer)
        except NxdtError:  # of which records of messages say more
            return None
        return runner and runner.settings


class UnpairedData(PreferenceData):
    """Answers apart from each other, each desirable or not; the second row of a sample is its prompt with the answer of
    another record.

    Raises:
        DataNeedsTokenizer, NoRoomForAnswers: as of :class:`PreferenceData`.
    """

    kind = "unpaired-preference"
    _apart = True
    example = '{"prompt": "...", "completion": "...", "label": true}'

    def _read_record(self, record: Mapping[str, Any], place: Place) -> Preference:
        return read_unpaired(record, place, merge=self._config.turn_order == "merge")


def _unkept(error: OSError) -> None:
    _log.warning("%s: cannot keep tokens there; each process makes its own", error)
