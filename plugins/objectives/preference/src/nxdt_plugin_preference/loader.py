"""The dataloader ``preference``: reads, renders and cuts a split's records when the run starts."""

from __future__ import annotations

import logging
import math
from functools import cached_property

import numpy as np

from nxdt_core.data.bins import drawn_bins
from nxdt_core.data.digest import digest
from nxdt_core.data.permutation import draw
from nxdt_core.data.records import read_records
from nxdt_core.data.tokens import padding_id
from nxdt_core.errors import DataNeedsTokenizer
from nxdt_core.protocols.dataloader import DataContext, SplitName
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_preference.config import PreferenceConfig
from nxdt_plugin_preference.dataset import PairDataset
from nxdt_plugin_preference.fitting import Fitting
from nxdt_plugin_preference.records import read_preference
from nxdt_plugin_preference.rendering import Pair, Renderer

__all__ = ["PreferenceDataloader"]

_log = logging.getLogger(__name__)
_EXAMPLE = '{"prompt": "...", "chosen": "...", "rejected": "..."}'


class PreferenceDataloader:
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
        self._fitting = Fitting(
            seq_length=context.seq_length,
            max_prompt_length=context.seq_length // 2 if limit is None else limit,
            mode=config.truncation_mode,
        )

    def split(self, name: SplitName) -> PairDataset | None:
        """The pairs of a split; None where no files and no share are named for it.

        Raises:
            NxdtError: of the files, as of :func:`~nxdt_core.data.records.read_records`.
            NotAChatTokenizer, TemplateMissing, TemplateUnknown, TemplateNeedsToken, TemplateUnreadable: of messages.
            AnswerMissing, AnswerEmpty, AnswersEqual, PromptMissing, BadPreference, TemplateRefuses,
            AnswersInseparable, SpecialTokenInText: of a record; each names the file and the line.
        """
        share = self._config.validation_fraction
        if share and name != "test":
            pairs, source = self._training
            seed = self._config.split_seed
            validating, training = draw(pairs, math.ceil(len(pairs) * share), seed=seed)
            return self._dataset(validating if name == "validation" else training, digest(source, name, share, seed))
        return self._dataset(*self._read(name)) if self._config.files(name) else None

    @cached_property
    def _training(self) -> tuple[list[Pair], str]:
        """What training and validation share, rendered once for both."""
        return self._read("train")

    def _read(self, name: SplitName) -> tuple[list[Pair], str]:
        """The pairs of a split's files, and a digest of all that decides them."""
        records, source = read_records(self._config.files(name), f"data.{name}_files", example=_EXAMPLE)
        renderer = Renderer(self._tokenizer, self._config)
        pairs = [
            self._fitting.fit(renderer.render(read_preference(record, str(place))))
            for place, record in records[: self._config.dev_choose_samples]
        ]
        if cut := sum(pair.cut for pair in pairs):
            _log.warning("data.%s_files: %d of %d pairs do not fit and were cut", name, cut, len(pairs))
        return pairs, digest("preference", source, renderer.fingerprint(), self._fitting, len(pairs))

    def _dataset(self, pairs: list[Pair], source: str) -> PairDataset:
        seq_length, pad_id = self._fitting.seq_length, padding_id(self._tokenizer)
        packs = None
        if self._config.packing:
            packs = drawn_bins(np.array([pair.lengths for pair in pairs], np.int64), seq_length, seed=self._seed)
        return PairDataset(pairs, packs, seq_length=seq_length, pad_id=pad_id, source=source)
