"""The dataloader ``megatron-data``: samples of Megatron's files, blends, and the indices of what is in each sample.

A split of a file has the document, sample and shuffle index of Megatron-Core's ``GPTDataset``. Documents are laid end
to end in a random order, and every ``seq_length`` tokens a sample begins. For the same file, seed and length the three
are, number for number, what Megatron-Core builds for one pass (``num_samples=None``), so that sample i here is sample i
there. Where it walks through the documents one by one, this is arithmetic on whole arrays: sample k begins at token
``k * seq_length``, and a binary search in the running sum of lengths says where that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import cached_arrays, digest, file_digest, is_array
from nxdt_core.data.mixture import Mixture
from nxdt_core.data.packing import Packing
from nxdt_core.data.sampler import Head
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import DataContext, DatasetSplits, MapDataset, Split, SplitName
from nxdt_plugin_megatron_data.config import (
    SPLITS,
    MegatronDataConfig,
    read_blend,
    read_shares,
    short_names,
    split_bounds,
)
from nxdt_plugin_megatron_data.errors import EmptySplit, EndOfDocumentUnknown, OtherTokenizer, TokenOutsideVocabulary
from nxdt_plugin_megatron_data.indexed_files import IndexedTokens, bin_path, provenance_path, read_provenance

_log = logging.getLogger("nxdt.data")


_SLOTS = 1 << 20
"""Places of the pattern that a blend repeats: shares are kept to a millionth."""


@dataclass(frozen=True, slots=True)
class Indices:
    """Arrays that say which tokens each sample is made of."""

    documents: NDArray[np.int32]
    """[documents] sequences of the file in the order in which they are laid out."""
    samples: NDArray[np.int32 | np.int64]
    """[samples + 1, 2] where each sample begins: a place in ``documents``, and tokens into that sequence. The last
    row is the end of the last sample."""
    shuffle: NDArray[np.uint32 | np.int64]
    """[samples] the sample at each place of the order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The samples of documents end to end: every ``seq_length`` tokens one begins."""

    seq_length: int
    extra: bool = True
    """Each sample has one token more than that, for the last label; it is the first of the next sample."""
    drop_last: bool = True
    """Leave out what is left behind the last whole sample."""

    def count(self, tokens: int) -> int:
        """Return the number of samples in a pass over all documents, which have so many ``tokens`` together."""
        available = max(0, tokens - int(self.extra))
        return available // self.seq_length if self.drop_last else -(-available // self.seq_length)

    def build(self, lengths: NDArray[np.int32], documents: range, *, seed: int) -> Indices:
        """Lay out the sequences ``documents`` of a file with ``lengths`` [sequences]."""
        random = np.random.RandomState(seed % 2**32)  # whose stream numpy has frozen, and which Megatron-Core takes
        order = np.arange(documents.start, documents.stop, dtype=np.int32)
        random.shuffle(order)
        samples = self._starts(lengths, order)
        count = len(samples) - 1
        wide = count >= 2**32 - 2
        shuffle = np.arange(count, dtype=np.int64) if wide else np.arange(count, dtype=np.uint32)
        random.shuffle(shuffle)
        return Indices(documents=order, samples=samples, shuffle=shuffle)

    def fit(self, indices: Indices, lengths: NDArray[np.int32], documents: range) -> bool:
        """Return whether ``indices`` have the sequences ``documents`` of a file with ``lengths``, in any order."""
        if not _is_permutation(indices.documents, documents):
            return False
        samples = self._starts(lengths, indices.documents)
        same = is_array(indices.samples, "i", *samples.shape) and np.array_equal(indices.samples, samples)
        return same and _is_permutation(indices.shuffle, range(len(samples) - 1))

    def _starts(self, lengths: NDArray[np.int32], order: NDArray[np.int32]) -> NDArray[np.int32 | np.int64]:
        """Return the places at which the samples begin, and at which the last ends.

        A sample that begins with the first token of a document, and shares no token with the one before, is said to
        begin behind the last token of the document before it.
        """
        ends = np.cumsum(lengths[order], dtype=np.int64)
        count = self.count(int(ends[-1]) if len(ends) else 0)
        if not count:
            return np.zeros((1, 2), np.int32)
        at = np.arange(count + 1, dtype=np.int64) * self.seq_length
        at[-1] = min(at[-1], ends[-1] - int(self.extra))
        places = np.searchsorted(ends, at, side="right" if self.extra else "left")
        places[0] = 0  # also where the first documents are empty
        begins = np.where(places > 0, ends[places - 1], 0)
        wide = max(len(ends), int((at - begins).max())) > np.iinfo(np.int32).max
        return np.stack([places, at - begins], axis=1).astype(np.int64 if wide else np.int32)


def _is_permutation(order: NDArray[np.integer], of: range) -> bool:
    return is_array(order, "iu", len(of)) and np.array_equal(np.sort(order), np.arange(of.start, of.stop))


def cached_indices(
    directory: Path, name: str, build: Callable[[], Indices], fits: Callable[[Indices], bool]
) -> Indices:
    """Return the index ``name`` of ``directory``, built where it is missing or damaged.

    Where the directory cannot be written, the index stays in the memory of this process, and a warning says so.
    """

    def on_error(error: OSError) -> None:
        reason = error.strerror or str(error)
        _log.warning("%s: cannot keep an index there (%s); each process builds its own", directory, reason)

    return cached_arrays(directory, name, Indices, build, on_error, fits)


class IndexedDataset(MapDataset):
    """A map-style dataset; sample i is sample i of Megatron-Core's ``GPTDataset`` for the same indices.

    Args:
        source: the file.
        indices: which of its tokens each sample is made of.
        seq_length: tokens of a sample.
        extra: whether a sample takes one token more, for its last label.
        packing: separation of documents in one sample; None: they are one text, and every label counts.
        eod_id: the token that ends a document, where it is known: with ``packing``, documents also end there.
        vocab_size: ids are below; None does not look.
        vocab_owner: whose vocabulary it is, for errors.
        content: digest of the file and of what the indices were built by.
    """

    def __init__(
        self,
        source: IndexedTokens,
        indices: Indices,
        *,
        seq_length: int,
        extra: bool,
        packing: Packing | None,
        eod_id: int | None,
        vocab_size: int | None,
        vocab_owner: str = "the model",
        content: str,
    ) -> None:
        self._source, self._indices, self._content = source, indices, content
        self._seq_length, self._extra, self._window = seq_length, extra, seq_length + int(extra)
        self._packing, self._eod_id = packing, eod_id
        self._vocab_size, self._vocab_owner = vocab_size, vocab_owner

    def __len__(self) -> int:
        return len(self._indices.shuffle)

    def __getitem__(self, index: int, /) -> Sample:
        """Sample ``index``.

        Raises:
            TokenOutsideVocabulary: it holds an id that the model has no row for.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        window, borders, filled = self._tokens(index)
        places = np.arange(self._seq_length)
        inputs = window[: self._seq_length]
        labels = window[1:] if self._extra else np.append(window[1:], IGNORE_INDEX)
        if filled < self._window:
            labels = np.where(places < filled - 1, labels, IGNORE_INDEX)
        sample = Sample(input_ids=inputs, labels=labels)
        if self._packing is not None:
            # Documents begin where sequences do, and behind each end-of-document token: places 1 … seq.
            starts = borders[(borders > 0) & (borders <= len(inputs))]
            if self._eod_id is not None:
                starts = np.union1d(starts, np.flatnonzero(inputs == self._eod_id) + 1)
            sample = self._packing.sample(inputs, labels, starts)
        if filled >= self._seq_length:
            return sample
        if sample.document_ids is not None:
            sample.document_ids[filled:] = -1
        return replace(sample, padding=places >= filled)

    def fingerprint(self) -> str:
        """Digest of the file, the indices' settings and how samples are cut."""
        return digest(self._content, len(self), self._seq_length, self._extra, self._packing, self._eod_id)

    def _tokens(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Tokens [window], places in them at which another sequence begins, and how many were found."""
        indices, source = self._indices, self._source
        source.check()
        number = int(indices.shuffle[index])
        (first, offset), (last, end) = indices.samples[number : number + 2].tolist()
        sequences = indices.documents[first : last + 1]
        counts = source.lengths[sequences].astype(np.int64)
        begins = source.pointers[sequences] // source.dtype.itemsize
        counts[-1] = end + int(self._extra)
        counts[0] -= offset
        begins[0] += offset
        borders = np.cumsum(counts)
        filled = min(int(borders[-1]), self._window)
        window = np.empty(self._window, np.int64)
        at = 0
        for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
            window[at : at + count] = source.tokens(begin, count)
            at += count
        window[filled:] = 0
        if self._vocab_size is not None:
            unsigned = window.view(np.uint64)  # of which a negative token is the largest
            position = int(unsigned.argmax())
            if int(unsigned[position]) >= self._vocab_size:
                raise TokenOutsideVocabulary(
                    path=str(source.prefix),
                    sequence=int(sequences[np.searchsorted(borders, position, side="right")]),
                    token=int(window[position]),
                    owner=self._vocab_owner,
                    last=self._vocab_size - 1,
                )
        return window, borders[:-1], filled


class BlendedDataset(MapDataset):
    """Samples of several sets such that every stretch of the order has them in the wanted shares.

    A set's places in the pattern are evenly spaced, so that at every point its count is within two samples of its
    share. (Megatron-Core takes the set that is furthest behind, in an index as long as the run; a pattern has no
    length, so that neither a longer run nor a large set with a small weight costs anything.) A pass ends once each set
    was seen whole, the others more than once for it.

    Args:
        datasets: none of them empty.
        shares: of each, with the sum 1.
    """

    def __init__(self, datasets: Sequence[MapDataset], shares: Sequence[float]) -> None:
        self._datasets = datasets
        self._sizes = [len(dataset) for dataset in datasets]
        exact = np.array(shares) * _SLOTS
        self._counts: NDArray[np.int64] = np.floor(exact).astype(np.int64)  # rounded by largest remainder
        missing = _SLOTS - int(self._counts.sum())
        self._counts[np.argsort(self._counts - exact, kind="stable")[:missing]] += 1
        times = np.concatenate([(np.arange(count) + 0.5) / count for count in self._counts])
        order = np.argsort(times, kind="stable")
        self._owners = np.repeat(np.arange(len(datasets), dtype=np.int32), self._counts)[order]
        self._ranks = np.concatenate([np.arange(count, dtype=np.int32) for count in self._counts])[order]
        self._length = 0
        for which, size in enumerate(self._sizes):  # behind the last sample of each set, counted over all its passes
            turn, rank = divmod(size - 1, int(self._counts[which]))
            slot = np.flatnonzero((self._owners == which) & (self._ranks == rank))[0]
            self._length = max(self._length, turn * _SLOTS + int(slot) + 1)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Sample:
        return self.at(index, 0)

    def at(self, index: int, epoch: int) -> Sample:
        """Return the sample at ``index`` in a pass; each pass continues where the one before left each set."""
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        which, number = self.source(index + epoch * self._length)
        return self._datasets[which][number]

    def source(self, place: int) -> tuple[int, int]:
        """Return the set at a place of the order, passes counted through, and the number of its sample."""
        turn, slot = divmod(place, _SLOTS)
        which = int(self._owners[slot])
        number = turn * int(self._counts[which]) + int(self._ranks[slot])
        return which, number % self._sizes[which]

    def fingerprint(self) -> str:
        """Digest of the sets and their shares."""
        return digest(*(dataset.fingerprint() for dataset in self._datasets), self._counts)


class ChainedDataset(Mixture):
    """Each sample of each set once, one set behind the other."""

    def __init__(self, datasets: Sequence[MapDataset]) -> None:
        super().__init__(datasets, [len(dataset) for dataset in datasets])

    def fingerprint(self) -> str:
        """Digest of the sets in their order."""
        return digest("chained", *(dataset.fingerprint() for dataset in self._datasets))


def in_shares(datasets: Sequence[MapDataset], shares: Sequence[float]) -> list[Head]:
    """Return the first samples of each set: as many as can be had in the wanted shares with none of them twice."""
    most = min(len(dataset) / share for dataset, share in zip(datasets, shares, strict=True))
    return [Head(dataset, max(1, round(most * share))) for dataset, share in zip(datasets, shares, strict=True)]


class MegatronData(DatasetSplits):
    """Samples of Megatron's files.

    Raises:
        EndOfDocumentUnknown: ``eod_mask_loss`` without a tokenizer that has an end-of-text token.
    """

    def __init__(self, config: MegatronDataConfig, context: DataContext) -> None:
        self._config = config
        self._context = context
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
        note, tokenizer = read_provenance(prefix), self._context.tokenizer
        if note is not None and tokenizer is not None:
            for aspect, value, expected in (
                ("vocabulary", note.vocab_size, tokenizer.vocab_size),
                ("fingerprint", note.fingerprint, tokenizer.fingerprint()),
            ):
                if value != expected:
                    beside = str(provenance_path(prefix))
                    raise OtherTokenizer(path=str(prefix), note=beside, aspect=aspect, found=value, expected=expected)
        return IndexedTokens(prefix)

    def _dataset(self, source: IndexedTokens, name: SplitName) -> IndexedDataset:
        config, context = self._config, self._context
        by_split = isinstance(config.data_prefix, Mapping)
        sequences = range(len(source)) if by_split else split_bounds(self._shares, len(source))[SPLITS.index(name)]
        windows = Windows(
            seq_length=context.seq_length,
            extra=not config.no_seqlen_plus_one_input_tokens,
            drop_last=name != "validation" or config.validation_drop_last,
        )
        length, extra = windows.seq_length, windows.extra
        tokens = int(source.lengths[sequences.start : sequences.stop].sum(dtype="int64"))
        if not windows.count(tokens):
            raise EmptySplit(
                split=name,
                path=str(source.prefix),
                documents=len(sequences),
                tokens=tokens,
                seq_length=length,
                needed=(length if windows.drop_last else 1) + int(extra),
            )
        seed, lengths = context.seed, source.lengths
        settings = (sequences, length, seed, extra, windows.drop_last)
        content = digest(file_digest(bin_path(source.prefix)), source.dtype.str, lengths, settings)
        directory = config.index_mapping_dir or source.prefix.parent / "index_mapping"
        indices = cached_indices(
            directory,
            f"{source.prefix.name}-{name}-{content}",
            lambda: windows.build(lengths, sequences, seed=seed),
            lambda cached: windows.fit(cached, lengths, sequences),
        )
        packing = None
        if config.reset_attention_mask or config.reset_position_ids or config.eod_mask_loss:
            packing = Packing(
                reset_attention_mask=config.reset_attention_mask,
                reset_position_ids=config.reset_position_ids,
                eod_id=self._eod_id if config.eod_mask_loss else None,
            )
        vocab_size = context.vocab_size
        if vocab_size is None and context.tokenizer is not None:
            vocab_size = context.tokenizer.vocab_size
        return IndexedDataset(
            source,
            indices,
            seq_length=length,
            extra=extra,
            packing=packing,
            eod_id=self._eod_id,
            vocab_size=vocab_size,
            vocab_owner="the model" if context.vocab_size is not None else "the tokenizer",
            content=content,
        )
