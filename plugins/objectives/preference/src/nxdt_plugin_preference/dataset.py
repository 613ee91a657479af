"""Pairs in compact arrays, and as samples of two rows: chosen answers in one, rejected ones in the other.

Of answers apart from each other, one row has each, and the other row its prompt with another's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import are_offsets, digest, is_array
from nxdt_core.data.files.records import BadRecords, UnusedFields
from nxdt_core.data.tokens import compact_dtype
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import DataReport, MapDataset, TokenCount
from nxdt_plugin_preference.objectives import PAIR, SCORES
from nxdt_plugin_preference.rendering import Pair

ALIKE = "cut to the sequence length, both answers are the same"
_REASONS = (ALIKE, "they cannot be used")
_PADDING = -1
"""Document number of padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairArrays:
    """Pairs, or answers apart from each other, as arrays alone, which processes can share."""

    tokens: NDArray[np.unsignedinteger]
    """[tokens] of each pair's prompt, chosen answer and rejected answer; of each prompt and answer."""
    starts: NDArray[np.int64]
    """[3 × pairs + 1] or [2 × answers + 1] place of the first token of each part, and the number of all tokens."""
    others: NDArray[np.int64]
    """[answers] number of the one whose answer is in the second row; empty of pairs."""
    scores: NDArray[np.float32]
    """[pairs] margins, or [answers] 1 where it is desirable, else −1."""
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

    def fits(self, apart: bool, vocab_size: int) -> bool:
        """Return whether the arrays agree, as those of answers ``apart`` from each other or of pairs, and all tokens
        are of the vocabulary."""
        pairs, unused = len(self.cut), len(self.unused_fields)
        return (
            are_offsets(self.starts, len(self.tokens))
            and is_array(self.starts, "i", (2 if apart else 3) * pairs + 1)
            and is_array(self.others, "i", pairs if apart else 0)
            and 0 <= self.others.min(initial=0) <= self.others.max(initial=0) < max(pairs, 1)
            and self.lengths.min(initial=1) > 0
            and is_array(self.tokens, "u", len(self.tokens))
            and self.tokens.max(initial=0) < vocab_size
            and is_array(self.scores, "f", pairs)
            and is_array(self.cut, "b", pairs)
            and is_array(self.left_out, "i", len(_REASONS))
            and is_array(self.bad, "U", len(self.bad))
            and is_array(self.unused_fields, "U", unused)
            and is_array(self.unused_counts, "i", unused)
            and is_array(self.settings, "U", 1)
        )

    def parts(self, pair: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens of the prompt and of the answers of both rows."""
        if len(self.others):
            second = 2 * int(self.others[pair]) + 1
            return self._part(2 * pair), self._part(2 * pair + 1), self._part(second)
        return self._part(3 * pair), self._part(3 * pair + 1), self._part(3 * pair + 2)

    def _part(self, number: int) -> NDArray[np.int64]:
        begin, end = self.starts[number : number + 2]
        return self.tokens[begin:end].astype(np.int64)

    @property
    def _sizes(self) -> NDArray[np.int64]:
        """[parts, pairs] tokens of the prompts and of the answers."""
        return np.diff(self.starts).reshape(-1, 2 if len(self.others) else 3).T

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[pairs, 2] tokens of the prompt with the answer of each row."""
        prompt, first, *second = self._sizes
        return np.stack([prompt + first, prompt + (second[0] if second else first[self.others])], axis=1)

    @property
    def report(self) -> DataReport:
        """Return statistics of them; the length of a pair is that of its longer row."""
        prompt, *answers = self._sizes
        lengths = np.stack([prompt + answer for answer in answers])
        return DataReport(
            records=len(self),
            tokens=TokenCount(tokens=int(lengths.sum()), trained=int(np.sum(answers))),
            lengths=lengths.max(axis=0),
            truncated=int(self.cut.sum()),
            left_out={reason: count for reason, count in zip(_REASONS, self.left_out.tolist(), strict=True) if count},
            bad=self.bad.tolist(),
            unused=dict(zip(self.unused_fields.tolist(), self.unused_counts.tolist(), strict=True)),
        )


def gather(
    pairs: Iterable[Pair],
    bad: BadRecords,
    unused: UnusedFields,
    settings: Callable[[], str],
    *,
    vocab_size: int,
    apart: bool = False,
) -> PairArrays:
    """Put the pairs whose answers differ end to end, or all answers ``apart`` from each other.

    ``bad`` and ``unused`` count while ``pairs`` are made, after which ``settings`` knows what decided them."""
    dtype = compact_dtype(vocab_size)
    tokens = bytearray()  # which grows in place, where arrays would be held twice
    lengths: list[int] = []
    cut: list[bool] = []
    scores: list[float] = []
    of_records: list[range] = []
    alike = 0
    for pair in pairs:
        if not apart and pair.answers[0] == pair.answers[1]:
            alike += 1
            continue
        entries = [(pair.prompt, answer) for answer in pair.answers] if apart else [(pair.prompt, *pair.answers)]
        of_records.append(range(len(cut), len(cut) + len(entries)))
        for part in (part for entry in entries for part in entry):
            tokens += np.array(part, dtype).tobytes()
            lengths.append(len(part))
        cut += [pair.cut] * len(entries)
        scores += pair.scores or [0.0]
    # Rotated by a record, so that the answers of the second rows are those of the first (TRL's estimate of the KL).
    around = zip(of_records, [*of_records[-1:], *of_records], strict=False) if apart else ()
    others = [before[place % len(before)] for own, before in around for place in range(len(own))]
    return PairArrays(
        tokens=np.frombuffer(tokens, dtype),
        starts=np.cumsum([0, *lengths]),
        others=np.array(others, np.int64),
        scores=np.array(scores, np.float32),
        cut=np.array(cut, np.bool_),
        left_out=np.array([alike, bad.count]),
        bad=np.array(bad.reasons, np.str_),
        unused_fields=np.array(list(unused.counts), np.str_),
        unused_counts=np.array(list(unused.counts.values()), np.int64),
        settings=np.array([settings()]),
    )


class PairDataset(MapDataset):
    """A map-style dataset of samples [2, seq_length].

    ``labels`` are those of prompt and answer; ``loss_weights`` say which are the answer's, and the value
    ``answer_scores`` its margin or label. Answers of one pair have the same document number.

    Args:
        pairs: prompts that have at most ``seq_length`` tokens with their own answers.
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
        self._scored = bool(pairs.scores.any())
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
        documents, scores = np.full(shape, _PADDING, np.int64), np.zeros(shape, np.float32)
        ends = [0] * PAIR
        for number, place in enumerate([index] if self._packs is None else self._packs[index]):
            prompt, *answers = self._pairs.parts(int(place))
            for row, answer in enumerate(answers):
                tokens = np.concatenate([prompt, answer])[: self._seq_length]
                begin, end = ends[row], ends[row] + len(tokens)
                ids[row, begin:end] = tokens
                labels[row, begin : end - 1] = tokens[1:]
                weights[row, begin + max(0, len(prompt) - 1) : end - 1] = 1
                positions[row, begin:end] = np.arange(end - begin)
                documents[row, begin:end] = number
                if row == 0 or not len(self._pairs.others):
                    scores[row, begin:end] = self._pairs.scores[place]
                ends[row] = end
        packed = self._packs is not None
        return Sample(
            input_ids=ids,
            labels=labels,
            loss_weights=weights,
            position_ids=positions if packed else None,
            document_ids=documents if packed else None,
            padding=documents < 0,
            values={SCORES: scores} if self._scored else {},
        )

    def fingerprint(self) -> str:
        """Digest of the records, of how they were rendered, cut and put together, and of the sequence length."""
        return self._source if self._packs is None else digest(self._source, *self._packs)

    def report(self) -> DataReport:
        """Return a report of the pairs, and of the places that they fill; of answers apart, in the first row."""
        report, rows = self._pairs.report, 1 if len(self._pairs.others) else PAIR
        places = len(self) * rows * self._seq_length
        return replace(report, efficiency=report.tokens.tokens / places, of_records=self._of_records)
