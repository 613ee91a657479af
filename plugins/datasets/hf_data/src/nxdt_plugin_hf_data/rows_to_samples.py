"""From rows to samples: whether rows are samples or documents, and what holds for either."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import digest
from nxdt_core.data.files.paths import WatchedFiles
from nxdt_core.data.packing import PackedDataset, Packing
from nxdt_core.data.tokens import TokenStream
from nxdt_core.errors.data import DataNeedsTokenizer, SpecialTokenMissing, TooFewTokens
from nxdt_core.protocols.dataset import DataContext, MapDataset, SplitName
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_hf_data.columns import TokenColumns
from nxdt_plugin_hf_data.config import HfDataConfig
from nxdt_plugin_hf_data.errors import MisfitRows, PaddedDocuments
from nxdt_plugin_hf_data.rows import RowDataset
from nxdt_plugin_hf_data.vocabulary import Guarded

__all__ = ["Cutting", "TextFraming"]


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
class Cutting:
    """What makes samples of a dataset's tokens."""

    seq_length: int
    vocab_size: int | None
    packs: bool | None
    """``data.packing``."""
    packing: Packing

    @classmethod
    def of(cls, config: HfDataConfig, context: DataContext) -> Cutting:
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
        return Guarded(dataset, self.vocab_size, path, labelled=columns.labels is not None, files=files)

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
        return Guarded(dataset, self.vocab_size, path, labelled=columns.labels is not None, files=files)


def _special(key: str, token_id: int | None, meaning: str) -> int:
    if token_id is None:
        raise SpecialTokenMissing(key=key, token=meaning)
    return token_id
