"""Pairs that are too long are cut, first the prompt, then the answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nxdt_core.data.cache import digest
from nxdt_core.data.files.records import Record, UnusedFields, describe_unused, read_records
from nxdt_core.data.packing import shuffled_bins
from nxdt_core.data.sampler import draw
from nxdt_core.data.tokens import padding_id
from nxdt_core.errors.data import DataNeedsTokenizer
from nxdt_core.protocols.dataset import DataContext, SplitName
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_preference.config import PreferenceConfig, TruncationMode
from nxdt_plugin_preference.dataset import PairDataset
from nxdt_plugin_preference.errors import EmptySplit, NoRoomForAnswers, PairsCutAlike
from nxdt_plugin_preference.records import read_preference
from nxdt_plugin_preference.rendering import Pair, Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedPairs:
    """The rule of TRL's DPO trainer up to 0.10, which NxD Training uses.

    Raises:
        NoRoomForAnswers: a prompt that is cut leaves no answer.
    """

    seq_length: int
    max_prompt_length: int
    mode: TruncationMode

    def __post_init__(self) -> None:
        if self.max_prompt_length >= self.seq_length:
            raise NoRoomForAnswers(prompt=self.max_prompt_length, sequence=self.seq_length)

    def fit(self, pair: Pair) -> Pair:
        """Return as much of the prompt and of the answers as a sequence holds; ``pair`` itself where that is all."""
        if max(pair.lengths) <= self.seq_length:
            return pair
        limit = self.max_prompt_length
        prompt = pair.prompt[:limit] if self.mode == "keep_start" else pair.prompt[-limit:]
        left = self.seq_length - len(prompt)
        return replace(pair, prompt=prompt, chosen=pair.chosen[:left], rejected=pair.rejected[:left], cut=True)


_log = logging.getLogger(__name__)
_EXAMPLE = '{"prompt": "...", "chosen": "...", "rejected": "..."}'
_ALIKE = "cut to the sequence length, both answers are the same"


class PreferenceData:
    """Pairs of answers.

    Raises:
        DataNeedsTokenizer: the run has no tokenizer.
        NoRoomForAnswers: a prompt may be as long as a sequence.
    """

    def __init__(self, config: PreferenceConfig, context: DataContext) -> None:
        if context.tokenizer is None:
            raise DataNeedsTokenizer(dataloader="preference")
        self._config = config
        self._seed = context.seed
        self._tokenizer: Tokenizer = context.tokenizer
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
            SpecialTokenInText: of a record; each names the file and the line.
            EmptySplit, PairsCutAlike: no pair is left.
            FieldsUnused: a record has fields that nothing uses, and the configuration refuses them.
        """
        if self._config.validation_fraction and name != "test":
            divided, source = self._division
            return self._dataset(divided[name], digest(source, name), name)
        return self._dataset(*self._read(name), name) if self._config.files(name) else None

    @cached_property
    def _division(self) -> tuple[dict[SplitName, list[Record]], str]:
        """Training records in two, drawn by the seed of the split; each part keeps the order of the files."""
        fraction, seed = self._config.validation_fraction, self._config.split_seed
        records, source = self._read("train")
        validating, training = draw(records, round(len(records) * fraction), seed=seed)
        parts: dict[SplitName, list[Record]] = {"validation": validating, "train": training}
        for split, part in parts.items():
            if not part:
                raise EmptySplit(fraction=fraction, records=len(records), split=split)
        return parts, digest(source, len(records), fraction, seed)

    def _read(self, name: SplitName) -> tuple[list[Record], str]:
        records, source = read_records(self._config.files(name), f"data.{name}_files", example=_EXAMPLE)
        return records[: self._config.dev_choose_samples], source

    def _dataset(self, records: Sequence[Record], source: str, name: SplitName) -> PairDataset:
        """The pairs of a split's records, of which ``source`` is a digest."""
        renderer = Renderer(self._tokenizer, self._config)
        unused = UnusedFields(self._config.unused_fields)
        fitted = []
        for place, record in records:
            rendered = renderer.render(read_preference(record, place))
            unused.add(place, rendered.unused)
            fitted.append(self._fitting.fit(rendered))
        pairs = [pair for pair in fitted if pair.chosen != pair.rejected]
        seq_length, left_out = self._fitting.seq_length, len(fitted) - len(pairs)
        if not pairs:
            raise PairsCutAlike(seq_length=seq_length, pairs=len(fitted), split=name)
        if left_out:
            _log.warning("%s data: %d records are left out: %s", name, left_out, _ALIKE)
        if cut := sum(pair.cut for pair in pairs):
            _log.warning("data.%s_files: %d of %d pairs do not fit and were cut", name, cut, len(pairs))
        if unused.counts:
            _log.warning("%s data: unused: %s", name, describe_unused(unused.counts))
        packs = None
        if self._config.packing:
            packs = shuffled_bins(np.array([pair.lengths for pair in pairs], np.int64), seq_length, seed=self._seed)
        return PairDataset(
            pairs,
            packs,
            seq_length=seq_length,
            pad_id=padding_id(self._tokenizer),
            source=digest("preference", source, renderer.fingerprint(), self._fitting, len(pairs)),
            left_out={_ALIKE: left_out} if left_out else {},
            unused=unused.counts,
        )
