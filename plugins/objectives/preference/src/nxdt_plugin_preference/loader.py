"""The dataloader ``preference``: reads, renders and cuts a split's records when the run starts."""

from __future__ import annotations

import logging
from functools import cached_property

import numpy as np

from nxdt_core.data.bins import drawn_bins
from nxdt_core.data.digest import digest
from nxdt_core.data.files.records import BadRecords, Records, UnusedFields, describe_unused, read_records
from nxdt_core.data.sampler import draw
from nxdt_core.data.tokens import padding_id
from nxdt_core.errors.data import DataNeedsTokenizer
from nxdt_core.protocols.dataset import DataContext, DataReport, SplitName, TokenCount
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_preference.config import PreferenceConfig
from nxdt_plugin_preference.dataset import PairDataset
from nxdt_plugin_preference.errors import EmptySplit, PairsCutAlike
from nxdt_plugin_preference.records import read_preference
from nxdt_plugin_preference.rendering import Renderer
from nxdt_plugin_preference.truncation import Fitting

__all__ = ["PreferenceData"]

_log = logging.getLogger(__name__)
_EXAMPLE = '{"prompt": "...", "chosen": "...", "rejected": "..."}'
_BAD = "they cannot be used"
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
        self._first_records = context.first_records
        self._tokenizer: Tokenizer = context.tokenizer
        limit = config.max_prompt_length
        self._fitting = Fitting(
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
    def _division(self) -> tuple[dict[SplitName, Records], str]:
        """Training records in two, drawn by the seed of the split; each part keeps the order of the files."""
        fraction, seed = self._config.validation_fraction, self._config.split_seed
        records, source = self._read("train")
        validating, training = draw(range(len(records)), round(len(records) * fraction), seed=seed)
        parts: dict[SplitName, Records] = {"validation": records.take(validating), "train": records.take(training)}
        for split, part in parts.items():
            if not part:
                raise EmptySplit(fraction=fraction, records=len(records), split=split)
        return parts, digest(source, len(records), fraction, seed)

    def _read(self, name: SplitName) -> tuple[Records, str]:
        config = self._config
        paths, key = config.files(name), f"data.{name}_files"
        records, source = read_records(paths, key, example=_EXAMPLE, split=name, columns=config.columns)
        return records[: config.dev_choose_samples], source

    def _dataset(self, records: Records, source: str, name: SplitName) -> PairDataset:
        """The pairs of a split's records, of which ``source`` is a digest."""
        renderer = Renderer(self._tokenizer, self._config)
        unused, bad = UnusedFields(self._config.unused_fields), BadRecords(self._config)
        merge = self._config.turn_order == "merge"
        found, records = len(records), records[: self._first_records]
        fitted = []
        for place, rendered in bad.usable(
            records, lambda record: (record[0], renderer.render(read_preference(record[1], record[0], merge=merge)))
        ):
            unused.add(place, rendered.unused)
            fitted.append(self._fitting.fit(rendered))
        pairs = [pair for pair in fitted if pair.chosen != pair.rejected]
        seq_length, left_out = self._fitting.seq_length, len(fitted) - len(pairs)
        for reason in bad.reasons:
            _log.warning("%s data: left out: %s", name, reason)
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
            packs = drawn_bins(np.array([pair.lengths for pair in pairs], np.int64), seq_length, seed=self._seed)
        return PairDataset(
            pairs,
            packs,
            seq_length=seq_length,
            pad_id=padding_id(self._tokenizer),
            source=digest("preference", source, renderer.fingerprint(), self._fitting, len(pairs)),
            report=DataReport(
                records=len(pairs),
                tokens=TokenCount(),
                lengths=np.empty(0, np.int64),
                left_out={reason: count for reason, count in ((_ALIKE, left_out), (_BAD, bad.count)) if count},
                bad=bad.reasons,
                unused=unused.counts,
                of_records=found if len(records) < found else None,
            ),
        )
