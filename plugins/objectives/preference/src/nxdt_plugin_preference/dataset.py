"""Pairs in compact arrays, and as samples of two rows: chosen answers in one, rejected ones in the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import digest
from nxdt_core.data.files.records import BadRecords, UnusedFields
from nxdt_core.data.tokens import compact_dtype
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import DataReport, TokenCount
from nxdt_plugin_preference.objectives import PAIR
from nxdt_plugin_preference.rendering import Pair

ALIKE = "cut to the sequence length, both answers are the same"
_REASONS = (ALIKE, "they cannot be used")
_PARTS = 3
"""Prompt, chosen answer and rejected answer of a pair."""
_PADDING = -1
"""Document number of padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairArrays:
    """Pairs, as arrays alone, which processes can share."""

    tokens: NDArray[np.unsignedinteger]
    """[tokens] of each pair's prompt, chosen answer and rejected answer."""
    starts: NDArray[np.int64]
    """[3 × pairs + 1] place of the first token of each part, and the number of all tokens."""
    cut: NDArray[np.bool_]
    """[pairs] whether it was longer."""
    left_out: NDArray[np.int64]
    """[reasons] records without a pair."""
    bad: NDArray[np.str_]
    """[records] place and reason of the first records that cannot be used."""
    unused_fields: NDArray[np.str_]
    """[fields] fields of records that nothing uses."""
    unused_counts: NDArray[np.int64]
    """[fields] records that have them."""
    settings: NDArray[np.str_]
    """[1] digest of what decided how the records were rendered."""

    def __len__(self) -> int:
        return len(self.cut)

    def parts(self, pair: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens of the prompt, of the chosen and of the rejected answer."""
        first, second, third, end = self.starts[_PARTS * pair : _PARTS * pair + _PARTS + 1]
        borders = (first, second), (second, third), (third, end)
        prompt, chosen, rejected = (self.tokens[one:other].astype(np.int64) for one, other in borders)
        return prompt, chosen, rejected

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[pairs, 2] tokens of the prompt with each answer."""
        prompt, chosen, rejected = np.diff(self.starts).reshape(-1, _PARTS).T
        return np.stack([prompt + chosen, prompt + rejected], axis=1)

    @property
    def report(self) -> DataReport:
        """Return statistics of them; the length of a pair is that of its longer row."""
        answers = np.diff(self.starts).reshape(-1, _PARTS)[:, 1:]
        return DataReport(
            records=len(self),
            tokens=TokenCount(tokens=int(self.lengths.sum()), trained=int(answers.sum())),
            lengths=self.lengths.max(axis=1),
            truncated=int(self.cut.sum()),
            left_out={reason: count for reason, count in zip(_REASONS, self.left_out.tolist(), strict=True) if count},
            bad=self.bad.tolist(),
            unused=dict(zip(self.unused_fields.tolist(), self.unused_counts.tolist(), strict=True)),
        )


def gather(
    pairs: Iterable[Pair], bad: BadRecords, unused: UnusedFields, settings: Callable[[], str], *, vocab_size: int
) -> PairArrays:
    """Put the pairs whose answers differ end to end; ``bad`` and ``unused`` count while ``pairs`` are made, after which
    ``settings`` knows what decided them."""
    dtype = compact_dtype(vocab_size)
    tokens = bytearray()  # which grows in place, where arrays would be held twice
    lengths: list[int] = []
    cut: list[bool] = []
    alike = 0
    for pair in pairs:
        if pair.chosen == pair.rejected:
            alike += 1
            continue
        for part in (pair.prompt, pair.chosen, pair.rejected):
            tokens += np.array(part, dtype).tobytes()
            lengths.append(len(part))
        cut.append(pair.cut)
    return PairArrays(
        tokens=np.frombuffer(tokens, dtype),
        starts=np.cumsum([0, *lengths]),
        cut=np.array(cut, np.bool_),
        left_out=np.array([alike, bad.count]),
        bad=np.array(bad.reasons, np.str_),
        unused_fields=np.array(list(unused.counts), np.str_),
        unused_counts=np.array(list(unused.counts.values()), np.int64),
        settings=np.array([settings()]),
    )


class PairDataset:
    """A map-style dataset of samples [2, seq_length].

    ``labels`` are those of prompt and answer; ``loss_weights`` say which are the answer's. Answers of one pair have the
    same document number.

    Args:
        pairs: prompts that have at most ``seq_length`` tokens with either answer.
        packs: numbers of the pairs in each sample, which fit into its rows. None puts each pair into its own sample,
            without document numbers: no token attends to the padding after it.
        seq_length: tokens of a row.
        pad_id: token after the last pair.
        source: digest of the data that the pairs were made from.
        of_records: records of the files where ``pairs`` are of the first ones.
    """

    def __init__(
        self,
        pairs: PairArrays,
        packs: Sequence[NDArray[np.int64]] | None = None,
        *,
        seq_length: int,
        pad_id: int,
        source: str,
        of_records: int | None = None,
    ) -> None:
        self._pairs = pairs
        self._packs = packs
        self._seq_length = seq_length
        self._pad_id = pad_id
        self._source = source
        self._of_records = of_records

    def __len__(self) -> int:
        return len(self._pairs if self._packs is None else self._packs)

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shape = PAIR, self._seq_length
        ids, labels = np.full(shape, self._pad_id, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        weights, positions = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
        documents = np.full(shape, _PADDING, np.int64)
        ends = [0] * PAIR
        for number, place in enumerate([index] if self._packs is None else self._packs[index]):
            prompt, *answers = self._pairs.parts(int(place))
            for row, answer in enumerate(answers):
                begin, end = ends[row], ends[row] + len(prompt) + len(answer)
                tokens = np.concatenate([prompt, answer])
                ids[row, begin:end] = tokens
                labels[row, begin : end - 1] = tokens[1:]
                weights[row, begin + max(0, len(prompt) - 1) : end - 1] = 1
                positions[row, begin:end] = np.arange(end - begin)
                documents[row, begin:end] = number
                ends[row] = end
        packed = self._packs is not None
        return Sample(
            input_ids=ids,
            labels=labels,
            loss_weights=weights,
            position_ids=positions if packed else None,
            document_ids=documents if packed else None,
        )

    def fingerprint(self) -> str:
        """Digest of the records, of how they were rendered, cut and put together, and of the sequence length."""
        return self._source if self._packs is None else digest(self._source, *self._packs)

    def report(self) -> DataReport:
        """Return a report of the pairs, and of the places that they fill."""
        report, places = self._pairs.report, len(self) * PAIR * self._seq_length
        return replace(report, efficiency=report.tokens.tokens / places, of_records=self._of_records)
