"""The dataloader ``megatron-data``: opens the files that the section names and lays their documents out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import fsum
from pathlib import Path

from nxdt_core.data.cache import digest, file_digest
from nxdt_core.data.packing import Packing
from nxdt_core.protocols.dataset import DataContext, DatasetSplits, Split, SplitName
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_megatron_data.config import (
    SPLITS,
    MegatronDataConfig,
    read_blend,
    read_shares,
    short_names,
    split_bounds,
)
from nxdt_plugin_megatron_data.dataset import (
    BlendedDataset,
    ChainedDataset,
    IndexedDataset,
    SampleSettings,
    are_indices,
    build_indices,
    cached_indices,
    count_samples,
    in_shares,
)
from nxdt_plugin_megatron_data.errors import EmptySplit, EndOfDocumentUnknown, OtherTokenizer
from nxdt_plugin_megatron_data.indexed_files import IndexedTokens, bin_path, provenance_path, read_provenance


class MegatronData(DatasetSplits):
    """Samples of Megatron's files.

    Raises:
        EndOfDocumentUnknown: ``eod_mask_loss`` without a tokenizer that has an end-of-text token.
    """

    def __init__(self, config: MegatronDataConfig, context: DataContext) -> None:
        self._config = config
        self._context = context
        self._tokenizer: Tokenizer | None = context.tokenizer
        self._made: dict[tuple[Path, SplitName], IndexedDataset] = {}
        self._eod_id = None if context.tokenizer is None else context.tokenizer.eos_id
        if config.eod_mask_loss and self._eod_id is None:
            raise EndOfDocumentUnknown()

    def split(self, name: SplitName) -> Split:
        """Return the samples of a split; None where it has neither files nor a share of them.

        Of several files a blend to train on, and each by its name to validate or test, in the blend's shares.

        Raises:
            IndexedFileMissing, BadIndexFile, DataShorterThanIndex: of the files.
            OtherTokenizer: the note next to a file names another tokenizer than the run's.
            EmptySplit: a file has not one whole sample of the split.
        """
        value = self._config.data_prefix
        if isinstance(value, Mapping):
            if name not in value:
                return None
            prefixes, shares = read_blend(value[name])
        else:
            if not self._shares[SPLITS.index(name)]:
                return None
            prefixes, shares = read_blend(value)
        if name != "train":  # each prefix once
            pairs, prefixes = [*zip(prefixes, shares or (), strict=False)], tuple(dict.fromkeys(prefixes))
            if shares is not None:
                shares = tuple(fsum(share for path, share in pairs if path == prefix) for prefix in prefixes)
        for prefix in prefixes:
            if (prefix, name) not in self._made:
                self._made[prefix, name] = self._dataset(self._open(prefix), name)
        datasets = [self._made[prefix, name] for prefix in prefixes]
        if len(datasets) == 1:
            return datasets[0]
        if name == "train":
            return ChainedDataset(datasets) if shares is None else BlendedDataset(datasets, shares)
        sets = datasets if shares is None else in_shares(datasets, shares)
        return dict(zip(short_names(prefixes), sets, strict=True))

    @cached_property
    def _shares(self) -> tuple[float, float, float]:
        text = self._config.splits_string
        return (1.0, 0.0, 0.0) if text is None else read_shares(text)

    def _open(self, prefix: Path) -> IndexedTokens:
        note, tokenizer = read_provenance(prefix), self._tokenizer
        if note is not None and tokenizer is not None:
            for aspect, found, expected in (
                ("vocabulary", note.vocab_size, tokenizer.vocab_size),
                ("fingerprint", note.fingerprint, tokenizer.fingerprint()),
            ):
                if found != expected:
                    beside = str(provenance_path(prefix))
                    raise OtherTokenizer(path=str(prefix), note=beside, aspect=aspect, found=found, expected=expected)
        return IndexedTokens(prefix)

    def _dataset(self, source: IndexedTokens, name: SplitName) -> IndexedDataset:
        own = isinstance(self._config.data_prefix, Mapping)
        sequences = range(len(source)) if own else split_bounds(self._shares, len(source))[SPLITS.index(name)]
        cut = self._cut
        drop_last = name != "validation" or self._config.validation_drop_last
        tokens = int(source.lengths[sequences.start : sequences.stop].sum(dtype="int64"))
        if not count_samples(tokens, seq_length=cut.seq_length, extra=cut.extra, drop_last=drop_last):
            raise EmptySplit(
                split=name,
                path=str(source.prefix),
                documents=len(sequences),
                tokens=tokens,
                seq_length=cut.seq_length,
                needed=cut.seq_length + int(cut.extra) if drop_last else 1 + int(cut.extra),
            )
        seed = self._context.seed
        settings = (sequences, cut.seq_length, seed, cut.extra, drop_last)
        content = digest(file_digest(bin_path(source.prefix)), source.dtype.str, source.lengths, settings)
        directory = self._config.index_mapping_dir or source.prefix.parent / "index_mapping"
        length, extra, lengths = cut.seq_length, cut.extra, source.lengths
        indices = cached_indices(
            directory,
            f"{source.prefix.name}-{name}-{content}",
            lambda: build_indices(lengths, sequences, seq_length=length, seed=seed, extra=extra, drop_last=drop_last),
            lambda found: are_indices(found, lengths, sequences, seq_length=length, extra=extra, drop_last=drop_last),
        )
        return IndexedDataset(source, indices, cut, content=content)

    @cached_property
    def _cut(self) -> SampleSettings:
        config, context = self._config, self._context
        packing = Packing(
            reset_attention_mask=config.reset_attention_mask,
            reset_position_ids=config.reset_position_ids,
            eod_id=self._eod_id if config.eod_mask_loss else None,
        )
        apart = config.reset_attention_mask or config.reset_position_ids or config.eod_mask_loss
        vocab_size = context.vocab_size
        if vocab_size is None and context.tokenizer is not None:
            vocab_size = context.tokenizer.vocab_size
        return SampleSettings(
            seq_length=context.seq_length,
            extra=not config.no_seqlen_plus_one_input_tokens,
            packing=packing if apart else None,
            eod_id=self._eod_id,
            vocab_size=vocab_size,
            vocab_owner="the model" if context.vocab_size is not None else "the tokenizer",
        )
