"""Pairs of answers that fit into a sequence, end to end in compact arrays, and statistics of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.files.records import BadRecords, UnusedFields
from nxdt_core.data.tokens import compact_dtype
from nxdt_core.protocols.dataset import DataReport, TokenCount
from nxdt_plugin_preference.rendering import Pair

ALIKE = "cut to the sequence length, both answers are the same"
_REASONS = (ALIKE, "they cannot be used")
_PARTS = 3
"""Prompt, chosen answer and rejected answer of a pair."""


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
