"""The dataloader ``hf-data``: from the keys of the section to the samples of each split."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from nxdt_core.data.digest import digest
from nxdt_core.data.tokens import tokenize
from nxdt_core.protocols.dataloader import DataContext, IterableDataset, MapDataset, SplitName
from nxdt_plugin_hf_data.columns import TokenColumn, TokenColumns, check_text, texts, token_columns
from nxdt_plugin_hf_data.config import HfDataConfig, SourceConfig
from nxdt_plugin_hf_data.cutting import Cutting, TextFraming
from nxdt_plugin_hf_data.directories import Saved, open_saved
from nxdt_plugin_hf_data.errors import EmptyData, MixtureInSequence
from nxdt_plugin_hf_data.mixture import Mixture, series
from nxdt_plugin_hf_data.tokenised import cached

__all__ = ["HfDataloader"]

_KEYS: Mapping[SplitName, str] = {"train": "train_dir", "validation": "val_dir", "test": "test_dir"}


class HfDataloader:
    """Samples of saved datasets.

    Raises:
        SpecialTokenMissing: ``eod_mask_loss`` asks for a token that no tokenizer names.
    """

    def __init__(self, config: HfDataConfig, context: DataContext) -> None:
        self._config = config
        self._context = context
        self._cutting = Cutting.of(config, context)
        self._weights = {name: source.weight for name, source in config.named_sources().items()}

    def split(self, name: SplitName) -> MapDataset | IterableDataset | None:
        """The samples of a split: of several sources a mixture to train on, and each once to validate or test on.

        Raises:
            MixtureInSequence: several sources are to be taken in their order.
            NxdtError: of the data, as :func:`open_saved` and :class:`Cutting` list them.
        """
        sources = self.sources(name)
        if len(sources) < 2:
            return next(iter(sources.values()), None)
        if name != "train":
            return series(sources)
        if not self._context.shuffle:
            raise MixtureInSequence(sources=tuple(sources))
        return Mixture(sources, self._weights)

    def sources(self, name: SplitName) -> Mapping[str, MapDataset]:
        """The samples of a split by the sources that have data for it, so that each may be judged alone.

        Raises:
            NxdtError: of the data.
        """
        named = self._config.named_sources()
        return {label: found for label, source in named.items() if (found := self._source(label, source, name))}

    def _source(self, label: str, source: SourceConfig, split: SplitName) -> MapDataset | None:
        path: Path | None = getattr(source, _KEYS[split])
        if path is None:
            return None
        key = f"data.sources.{label}.{_KEYS[split]}" if self._config.sources else f"data.{_KEYS[split]}"
        saved = open_saved(path, key=key, split=split)
        if not saved.table.num_rows:
            raise EmptyData(key=key, path=saved.path)
        columns = token_columns(saved.table, saved.path)
        if columns is None:
            return self._of_text(saved, source.text_key or self._config.text_key, split)
        lengths = np.diff(columns.input_ids.offsets)
        return self._cut(columns, saved.path, saved.content, split, self._cutting.packs_rows_of(lengths, saved.path))

    def _of_text(self, saved: Saved, text_key: str, split: SplitName) -> MapDataset:
        check_text(saved.table.schema, text_key, saved.path)
        framing = TextFraming.of(self._config, self._context.tokenizer)
        source = digest(saved.content, text_key, framing.fingerprint())
        column = saved.table.column(text_key)
        stream = cached(
            self._config.cache_dir or self._context.cache_dir,
            source,
            lambda: tokenize(
                texts(column, text_key, saved.path), framing.tokenizer, bos_id=framing.bos_id, eos_id=framing.eos_id
            ),
        )
        columns = TokenColumns(input_ids=TokenColumn.of_stream(stream))
        return self._cut(columns, saved.path, source, split, self._config.packing is not False)

    def _cut(self, columns: TokenColumns, path: str, source: str, split: SplitName, packs: bool) -> MapDataset:
        if packs:
            return self._cutting.packed(columns, path=path, source=source, split=split)
        return self._cutting.rows(columns, path=path, source=source)
