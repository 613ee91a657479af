"""Several streams as one, and a stream in a random order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nxdt_core.data.cache import digest
from nxdt_core.data.sampler import Permutation
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import IterableDataset


class Interleave(IterableDataset):
    """Endless streams by weight: the next sample is of the one that is furthest behind its share.

    Args:
        streams: endless ones.
        weights: weight of each stream, above 0.
    """

    def __init__(self, streams: Sequence[IterableDataset], weights: Sequence[float]) -> None:
        self._streams = streams
        self._shares = np.array(weights, np.float64) / np.sum(weights)
        self._drawn = np.zeros(len(streams), np.int64)

    def __iter__(self) -> Iterator[Sample]:
        iterators = [iter(stream) for stream in self._streams]
        while True:
            number = int(np.argmax(self._shares * (self._drawn.sum() + 1) - self._drawn))
            sample = next(iterators[number])
            self._drawn[number] += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        """Return the number of samples drawn from each stream, and the position of each."""
        return {"drawn": self._drawn.tolist(), "streams": [stream.state_dict() for stream in self._streams]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after what was drawn."""
        self._drawn = np.array(state["drawn"], np.int64)
        for stream, inner in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(inner)

    def fingerprint(self) -> str:
        """Digest of the streams and their shares."""
        return digest("interleave", *(stream.fingerprint() for stream in self._streams), self._shares)


class Blocks(IterableDataset):
    """A stream read ahead by blocks, each of which is taken in a random order.

    The position is that of the stream before the block, and the number of samples taken from the block. A resume reads
    the block again, so that the state contains no samples.

    Args:
        stream: the samples.
        size: samples of a block.
        seed: decides, with the number of the block, its order.
    """

    def __init__(self, stream: IterableDataset, *, size: int, seed: int) -> None:
        self._stream = stream
        self._size = size
        self._seed = seed
        self._before = stream.state_dict()
        self._block = self._taken = 0

    def __iter__(self) -> Iterator[Sample]:
        self._stream.load_state_dict(self._before)
        samples = iter(self._stream)
        while block := [sample for _, sample in zip(range(self._size), samples, strict=False)]:
            order = Permutation(len(block), seed=self._seed, epoch=self._block).take(np.arange(len(block)))
            after = self._stream.state_dict()
            for number in order[self._taken :].tolist():
                self._taken += 1
                yield block[number]
            self._before, self._block, self._taken = after, self._block + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position before the block, the block's number, and how many of its samples were taken."""
        return {"stream": self._before, "block": self._block, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the samples that were taken."""
        self._before, self._block, self._taken = state["stream"], state["block"], state["taken"]

    def fingerprint(self) -> str:
        """Digest of the stream and of the order."""
        return digest("blocks", self._stream.fingerprint(), self._size, self._seed)
