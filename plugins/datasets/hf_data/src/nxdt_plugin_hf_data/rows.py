"""From rows of a table to samples of the model: texts that are tokenised, and tokens that are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import digest
from nxdt_core.data.files.paths import WatchedFiles
from nxdt_core.data.packing import PackedDataset, Packing
from nxdt_core.data.tokens import TokenStream
from nxdt_core.errors.data import DataNeedsTokenizer, SpecialTokenMissing, TooFewTokens
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import DataContext, MapDataset, SplitName
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_hf_data.columns import TokenColumns
from nxdt_plugin_hf_data.config import HfDataConfig
from nxdt_plugin_hf_data.errors import MisfitRows, PaddedDocuments, RowTooLong, TokenOutOfVocabulary


class CheckedDataset(MapDataset):
    """The samples of ``dataset``, each looked at when it is read; those at both ends and some between at once.

    Args:
        dataset: whose samples these are.
        vocab_size: rows of the model's vocabulary; None where they are not known.
        path: names the dataset in errors.
        labelled: whether labels are others than the tokens that follow.
        files: in which the samples are mapped.

    Raises:
        TokenOutOfVocabulary: a sample holds a token from there on, or a negative one.
        DataFileChanged: a file has become shorter.
    """

    def __init__(
        self, dataset: MapDataset, vocab_size: int | None, path: str, *, labelled: bool, files: WatchedFiles
    ) -> None:
        self._dataset = dataset
        self._limit = vocab_size
        self._path = path
        self._labelled = labelled
        self._files = files
        if vocab_size is not None and len(dataset):
            for index in np.linspace(0, len(dataset) - 1, _PROBES, dtype=np.int64).tolist():
                self[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> Sample:
        self._files.check()
        sample = self._dataset[index]
        labels = sample.labels if self._labelled else sample.labels[-1:]  # the others are inputs, one place on
        for ids in (sample.input_ids, np.where(labels == IGNORE_INDEX, 0, labels)):
            check_ids(ids, self._limit, lambda: f"Sample {index} of {self._path}")
        return sample

    def fingerprint(self) -> str:
        """Return the fingerprint of the dataset."""
        return self._dataset.fingerprint()


_PROBES = 16


def check_ids(ids: NDArray[np.integer], limit: int | None, place: Callable[[], str]) -> None:
    """Check that all ``ids`` are from 0 to ``limit`` - 1.

    Raises:
        TokenOutOfVocabulary: one is not; ``place`` returns its location.
    """
    if limit is None or not len(ids):
        return
    lowest, highest = int(ids.min()), int(ids.max())
    if highest >= limit or lowest < 0:
        raise TokenOutOfVocabulary(place=place(), token=highest if highest >= limit else lowest, vocab_size=limit)


def check_columns(columns: TokenColumns, limit: int | None, place: Callable[[], str]) -> None:
    """See to the tokens, and to the labels of those that are learnt, as :func:`check_ids` does."""
    check_ids(columns.input_ids.values[:], limit, place)
    if columns.labels is not None:
        check_ids(columns.labels.values[:][columns.learnt(0, len(columns.input_ids))], limit, place)


class RowDataset(MapDataset):
    """A map-style dataset over rows of at most ``seq_length`` + 1 tokens.

    Args:
        columns: names of the dataset's columns.
        seq_length: tokens of a sample.
        packing: how documents of a row affect each other.
        path: names the dataset in errors.
        source: digest of the dataset.

    Raises:
        RowTooLong: a row has more tokens.
    """

    def __init__(self, columns: TokenColumns, *, seq_length: int, packing: Packing, path: str, source: str) -> None:
        lengths = np.diff(columns.input_ids.offsets)
        if lengths.max(initial=0) > seq_length + 1:
            row = int(np.argmax(lengths > seq_length + 1))
            raise RowTooLong(path=path, row=row, found=int(lengths[row]), seq_length=seq_length)
        self._columns = columns
        self._seq_length = seq_length
        self._packing = packing
        self._source = source

    def __len__(self) -> int:
        return len(self._columns.input_ids)

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        columns = self._columns
        return row_sample(
            columns.input_ids.row(index),
            None if columns.labels is None else columns.labels.row(index),
            columns.documents(index, index + 1),
            seq_length=self._seq_length,
            packing=self._packing,
        )

    def fingerprint(self) -> str:
        """Digest of the source and the sequence length, and of what differs from the default packing."""
        resets = (self._packing.reset_attention_mask, self._packing.reset_position_ids)
        return digest("rows", self._source, self._seq_length, *(() if all(resets) else resets))


def row_sample(
    ids: NDArray[np.integer],
    labels: NDArray[np.integer] | None,
    documents: NDArray[np.int64] | None,
    *,
    seq_length: int,
    packing: Packing,
) -> Sample:
    """Return a sample of one row's columns, each of at most ``seq_length`` + 1 tokens.

    Labels of a row are at their own token, as transformers has them, and move to the token before. What a row is
    short of is padding: token 0, seen by nothing and without a label. ``documents`` are those of
    :meth:`TokenColumns.documents`.
    """
    count = len(ids)
    if documents is None and count >= seq_length:
        return _whole(ids, ids if labels is None else labels, seq_length)
    inputs = np.zeros(seq_length, np.int64)
    inputs[: min(count, seq_length)] = ids[:seq_length]
    numbers = np.zeros(seq_length + 1, np.int64)
    numbers[:count] = 1 if documents is None else documents
    apart = numbers if packing.reset_attention_mask else np.minimum(numbers, 1)
    targets = np.full(seq_length, IGNORE_INDEX, np.int64)
    targets[: max(count - 1, 0)] = (ids if labels is None else labels)[1:]
    targets[(apart[1:] != apart[:-1]) | (apart[1:] == 0)] = IGNORE_INDEX
    within = numbers[:-1]
    if within.all() and within[0] == within[-1]:
        return Sample(input_ids=inputs, labels=targets)
    positions = np.maximum(np.cumsum(within > 0) - 1, 0)
    if packing.reset_position_ids:
        _, first, which = np.unique(within, return_index=True, return_inverse=True)
        positions -= np.where(within > 0, positions[first][which], 0)
    return Sample(input_ids=inputs, labels=targets, position_ids=positions, document_ids=apart[:-1] - 1)


def _whole(ids: NDArray[np.integer], labels: NDArray[np.integer], seq_length: int) -> Sample:
    """A sample of a row that has no padding."""
    targets = np.empty(seq_length, np.int64)
    targets[-1] = IGNORE_INDEX
    targets[: len(labels) - 1] = labels[1:]
    return Sample(input_ids=ids[:seq_length].astype(np.int64), labels=targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFraming:
    """The tokenizer of texts and what it puts around each."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None

    @classmethod
    def of(cls, config: HfDataConfig, tokenizer: Tokenizer | None) -> TextFraming:
        """Return what the configuration asks for.

        Raises:
            DataNeedsTokenizer: the run has no tokenizer.
            SpecialTokenMissing: it lacks a token that is asked for.
        """
        if tokenizer is None:
            raise DataNeedsTokenizer(dataloader="hf-data")
        bos = _special("data.add_bos", tokenizer.bos_id, "begin of text") if config.add_bos else None
        eos = _special("data.add_eos", tokenizer.eos_id, "end of text") if config.add_eos else None
        return cls(tokenizer=tokenizer, bos_id=bos, eos_id=eos)

    def around(self, ids: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return the tokens of a text with those that belong before and behind it."""
        ends = [[] if special is None else [special] for special in (self.bos_id, self.eos_id)]
        return np.concatenate([ends[0], ids, ends[1]], dtype=np.int64, casting="unsafe")

    def fingerprint(self) -> str:
        """Digest of all that decides the tokens of a text."""
        return digest(self.tokenizer.fingerprint(), self.bos_id, self.eos_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """Settings that make samples of a dataset's tokens."""

    seq_length: int
    vocab_size: int | None
    packs: bool | None
    """``data.packing``."""
    packing: Packing

    @classmethod
    def of(cls, config: HfDataConfig, context: DataContext) -> SampleSettings:
        """Return what the configuration asks for.

        Raises:
            SpecialTokenMissing: the end of text is to be left out of the loss, and no setting says which token it is.
        """
        eos = None if context.tokenizer is None else context.tokenizer.eos_id
        packing = Packing(
            reset_attention_mask=config.reset_attention_mask,
            reset_position_ids=config.reset_position_ids,
            eod_id=_special("data.eod_mask_loss", eos, "end of text") if config.eod_mask_loss else None,
        )
        return cls(seq_length=context.seq_length, vocab_size=context.vocab_size, packs=config.packing, packing=packing)

    def packs_rows_of(self, lengths: NDArray[np.int64], path: str) -> bool:
        """Return whether tokenised rows of these lengths are documents to pack.

        Raises:
            MisfitRows: no setting says it, and they all have one length which is not that of a sample.
        """
        if self.packs is not None:
            return self.packs
        low, high = int(lengths.min()), int(lengths.max())
        if low == high > 0 and len(lengths) > 1 and low not in (self.seq_length, self.seq_length + 1):
            raise MisfitRows(path=path, found=low, seq_length=self.seq_length)
        return low != high or low not in (self.seq_length, self.seq_length + 1)

    def rows(self, columns: TokenColumns, *, path: str, source: str, files: WatchedFiles) -> MapDataset:
        """Return the samples, one per row.

        Raises:
            RowTooLong: a row has more tokens than a sample.
            TokenOutOfVocabulary: one of the samples that are looked at has a token that the model has not.
        """
        dataset = RowDataset(columns, seq_length=self.seq_length, packing=self.packing, path=path, source=source)
        return CheckedDataset(dataset, self.vocab_size, path, labelled=columns.labels is not None, files=files)

    def packed(
        self, columns: TokenColumns, *, path: str, source: str, split: SplitName, files: WatchedFiles
    ) -> MapDataset:
        """Return the rows end to end, cut into samples.

        Raises:
            PaddedDocuments: rows are padded.
            TooFewTokens: they do not make up a sample.
            TokenOutOfVocabulary: one of the samples that are looked at has a token that the model has not.
        """
        ids, labels, mask = columns.input_ids, columns.labels, columns.attention_mask
        if mask is not None and not mask.values.all():
            raise PaddedDocuments(path=path)
        needed = self.seq_length + 1
        if len(ids.values) < needed:
            raise TooFewTokens(split=split, found=len(ids.values), needed=needed, seq_length=self.seq_length)
        dataset = PackedDataset(
            TokenStream(tokens=ids.values, starts=columns.starts()),
            seq_length=self.seq_length,
            packing=self.packing,
            source=source,
            labels=None if labels is None else labels.values,
        )
        return CheckedDataset(dataset, self.vocab_size, path, labelled=columns.labels is not None, files=files)


def _special(key: str, token_id: int | None, meaning: str) -> int:
    if token_id is None:
        raise SpecialTokenMissing(key=key, token=meaning)
    return token_id
