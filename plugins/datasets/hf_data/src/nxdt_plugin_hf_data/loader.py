"""The dataloader ``hf-data``, and tokens of a text column in a directory that later runs and other processes share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nxdt_core.data.cache import are_offsets, cached_arrays, digest, is_array
from nxdt_core.data.files.paths import WatchedFiles
from nxdt_core.data.files.records import count_records
from nxdt_core.data.mixture import mixed
from nxdt_core.data.packing import Packing
from nxdt_core.data.tokens import TokenStream, tokenize
from nxdt_core.errors.data import DataNeedsTokenizer, SpecialTokenMissing
from nxdt_core.protocols.dataset import DataContext, DatasetSplits, IterableDataset, MapDataset, Split, SplitName
from nxdt_plugin_hf_data.config import HfDataConfig
from nxdt_plugin_hf_data.errors import CacheUnwritable, NothingToLearn
from nxdt_plugin_hf_data.formats import files_of, open_saved
from nxdt_plugin_hf_data.rows import (
    Chunks,
    SampleSettings,
    TextFraming,
    TokenColumn,
    TokenColumns,
    chosen,
    is_tokenised,
    text_column,
    token_columns,
)
from nxdt_plugin_hf_data.stream import Blocks, FileStream, Interleave

_log = logging.getLogger(__name__)


_KEYS: Mapping[SplitName, str] = {"train": "train_dir", "validation": "val_dir", "test": "test_dir"}


def cached(directory: Path | None, name: str, make: Callable[[], TokenStream]) -> TokenStream:
    """Return what ``make`` returns, or what it returned when it was called for the same ``name``.

    Raises:
        CacheUnwritable: the directory cannot be written to, or is full.
    """

    def on_error(error: OSError) -> None:
        raise CacheUnwritable(path=str(directory), reason=error.strerror or str(error)) from error

    def fits(stream: TokenStream) -> bool:  # the documents are all of its tokens
        tokens, starts = np.asanyarray(stream.tokens), stream.starts
        return (
            is_array(tokens, "u", len(tokens))
            and is_array(starts, "i", len(starts))
            and are_offsets(np.append(starts, len(tokens)), len(tokens))
            and is_array(stream.weights, "f", 0)
        )

    return cached_arrays(directory, name, TokenStream, make, on_error, fits)


class HfData(DatasetSplits):
    """Samples of saved datasets.

    Raises:
        SpecialTokenMissing: ``eod_mask_loss`` asks for a token that no tokenizer names.
    """

    def __init__(self, config: HfDataConfig, context: DataContext) -> None:
        self._config = config
        self._context = context
        eos = None if context.tokenizer is None else context.tokenizer.eos_id
        packing = Packing(
            reset_attention_mask=config.reset_attention_mask,
            reset_position_ids=config.reset_position_ids,
            eod_id=_special("data.eod_mask_loss", eos, "end of text") if config.eod_mask_loss else None,
        )
        self._cutting = SampleSettings(
            seq_length=context.seq_length, vocab_size=context.vocab_size, packs=config.packing, packing=packing
        )
        self._weights = {name: source.weight for name, source in config.named_sources().items()}

    def split(self, name: SplitName) -> Split:
        """Return the samples of a split: of several sources a mixture to train on, and each by its name to validate or
        test.

        Raises:
            MixtureInSequence: several sources are to be taken in their order.
            NxdtError: of the data.
        """
        config, key, datasets = self._config, _KEYS[name], dict[str, Any]()
        open_source = self._stream if config.streaming else self._saved
        for label, source in config.named_sources().items():
            path = getattr(source, key)
            if path is not None:
                full_key = f"data.sources.{label}.{key}" if config.sources else f"data.{key}"
                datasets[label] = open_source(path, full_key, source.text_key or config.text_key, name)
        if not datasets:
            return None
        if name != "train":
            return datasets if len(datasets) > 1 else next(iter(datasets.values()))
        if not config.streaming:
            return mixed(datasets, self._weights, shuffle=self._context.shuffle)
        stream = next(iter(datasets.values()))
        if len(datasets) > 1:
            stream = Interleave(list(datasets.values()), [self._weights[label] for label in datasets])
        seed, size = self._context.seed, config.shuffle_block
        return Blocks(stream, size=size, seed=seed) if self._context.shuffle else stream

    def _stream(self, path: Path, key: str, text_key: str, split: SplitName) -> IterableDataset:
        trains = split == "train"
        return FileStream(
            files_of(path, key, split),
            key=key,
            text_key=text_key,
            framing=self._framing,
            cutting=self._cutting,
            split=split,
            endless=trains,
            seed=self._context.seed if trains and self._context.shuffle else None,
        )

    def _framing(self) -> TextFraming:
        """Return the tokenizer and what the configuration puts around texts.

        Raises:
            DataNeedsTokenizer: the run has no tokenizer.
            SpecialTokenMissing: it lacks a token that is asked for.
        """
        config, tokenizer = self._config, self._context.tokenizer
        if tokenizer is None:
            raise DataNeedsTokenizer(dataloader="hf-data")
        bos = _special("data.add_bos", tokenizer.bos_id, "begin of text") if config.add_bos else None
        eos = _special("data.add_eos", tokenizer.eos_id, "end of text") if config.add_eos else None
        return TextFraming(tokenizer=tokenizer, bos_id=bos, eos_id=eos)

    def _saved(self, path: Path, key: str, text_key: str, split: SplitName) -> MapDataset:
        directory = self._config.cache_dir or self._context.cache_dir
        saved = open_saved(path, key=key, split=split, digests=directory)
        chosen(saved.table.column_names, text_key, saved.path)
        if not is_tokenised(saved.table):
            framing = self._framing()
            source = digest(saved.content, text_key, framing.fingerprint())
            texts = text_column(saved.table, text_key, saved.path)
            stream = cached(
                directory,
                source,
                lambda: tokenize(texts, framing.tokenizer, bos_id=framing.bos_id, eos_id=framing.eos_id),
            )
            if blank := saved.table.num_rows - len(stream.starts):
                _log.warning("%s: left out %s: the text is empty", saved.path, count_records(blank))
            tokens = stream.tokens[:]
            ids = TokenColumn(values=Chunks([tokens]), offsets=np.append(stream.starts, len(tokens)))
            return self._cutting.samples(
                TokenColumns(input_ids=ids),
                packs=self._config.packing is not False,
                path=saved.path,
                source=source,
                split=split,
                files=WatchedFiles([], may_grow=True),  # what is cut are copies
            )
        columns = token_columns(saved.table, saved.path)
        packs = self._cutting.packs_rows_of(np.diff(columns.input_ids.offsets), saved.path)
        dataset = self._cutting.samples(
            columns, packs=packs, path=saved.path, source=saved.content, split=split, files=saved.files
        )
        if not columns.teach():
            raise NothingToLearn(key=key, path=saved.path, where="in each of its rows")
        return dataset


def _special(key: str, token_id: int | None, meaning: str) -> int:
    if token_id is None:
        raise SpecialTokenMissing(key=key, token=meaning)
    return token_id
