"""The dataset ``prompts``: records, each a sample of the prompt's tokens; rewards see the record itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nxdt_core.data.cache import digest
from nxdt_core.data.chat.rendering import prompt_ids, runner_of
from nxdt_core.data.files.records import Records
from nxdt_core.data.files.splits import SplitRecords
from nxdt_core.data.tokens import padding_id, text_ids
from nxdt_core.errors.data import DataNeedsTokenizer
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import DataContext, DatasetSplits, MapDataset, SplitName
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_grpo.config import PromptsConfig
from nxdt_plugin_grpo.errors import PromptMissing, PromptTooLong

_EXAMPLE = '{"prompt": "7 + 5 =", "solution": "12"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The record of a sample, and its prompt in tokens."""

    place: str
    """File and line."""
    ids: tuple[int, ...]
    record: Mapping[str, Any]


class PromptDataset(MapDataset):
    """A map-style dataset of samples [seq_length] without a loss, whose ``origin`` is a :class:`Prompt`."""

    def __init__(
        self, records: Records, tokenizer: Tokenizer, config: PromptsConfig, *, seq_length: int, source: str
    ) -> None:
        self._records, self._tokenizer, self._config = records, tokenizer, config
        self._seq_length, self._source = seq_length, source

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int, /) -> Sample:
        """Return the prompt's tokens, and the padding behind them.

        Raises:
            PromptMissing: the record has none.
            PromptTooLong: it leaves no room for a token of an answer.
            NxdtError: of messages, as of :func:`~nxdt_core.data.chat.rendering.prompt_ids`.
        """
        place, record = self._records[index]
        prompt, tokenizer = record.get("prompt"), self._tokenizer
        if isinstance(prompt, str):
            tokens = text_ids(prompt, tokenizer, add_bos=self._config.add_bos)
        elif isinstance(prompt, list) and prompt and all(isinstance(turn, dict) for turn in prompt):
            tokens = prompt_ids(prompt, tokenizer, self._config, place=str(place))
        else:
            raise PromptMissing(place=str(place), keys=", ".join(map(repr, record)))
        if not tokens and tokenizer.bos_id is not None:
            tokens = [tokenizer.bos_id]
        if not tokens:
            raise PromptMissing(place=str(place), keys=", ".join(map(repr, record)))
        if len(tokens) >= self._seq_length:
            raise PromptTooLong(place=str(place), tokens=len(tokens), most=1, window=self._seq_length)
        ids = np.full(self._seq_length, padding_id(tokenizer), np.int64)
        ids[: len(tokens)] = tokens
        origin = Prompt(place=str(place), ids=tuple(tokens), record=record)
        return Sample(input_ids=ids, labels=np.full_like(ids, IGNORE_INDEX), origin=origin)

    def fingerprint(self) -> str:
        """Digest of the records, and of what decides their tokens."""
        return self._source


class Prompts(DatasetSplits):
    """Prompts of the files of a run.

    Raises:
        DataNeedsTokenizer: the run has no tokenizer.
    """

    def __init__(self, config: PromptsConfig, context: DataContext) -> None:
        if context.tokenizer is None:
            raise DataNeedsTokenizer(dataloader="prompts")
        self._config, self._context = config, context
        self._tokenizer: Tokenizer = context.tokenizer
        self._records = SplitRecords(config, example=_EXAMPLE)

    def split(self, name: SplitName) -> PromptDataset | None:
        """Return the prompts of a split; None where no files and no share are named for it.

        Raises:
            NxdtError: of the files, as of :func:`~nxdt_core.data.files.records.read_records`.
        """
        chosen = self._records.of(name)
        if chosen is None:
            return None
        records, source = chosen
        config, runner = self._config, runner_of(self._config, self._tokenizer)
        settings = (len(records), self._tokenizer.fingerprint(), runner and runner.settings, config.add_bos)
        source = digest("prompts", source, settings)
        return PromptDataset(records, self._tokenizer, config, seq_length=self._context.seq_length, source=source)
