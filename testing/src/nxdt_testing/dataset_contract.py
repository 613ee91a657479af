"""Tests that every dataset must pass; its author subclasses this once for each kind of dataset.

Example, the whole test file of a plugin::

    from nxdt_testing.dataset_contract import DatasetContract

    class TestLines(DatasetContract):
        @pytest.fixture
        def make(self, tmp_path):
            return lambda text="some text that makes twenty samples or more": LineDataset(written(tmp_path, text))

        @pytest.fixture
        def changed(self, make):
            return make("another text of the same length")

        @pytest.fixture
        def variants(self, make):
            return {"seq_length": make(seq_length=24), "seed": make(seed=7)}

Map-style and iterable datasets are held to the same: what a run sees follows from the data and the state alone, never
from what was read before, from threads, or from how many ranks share a batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch, Sample
from nxdt_core.protocols.dataset import IterableDataset, MapDataset
from nxdt_core.protocols.tokenizer import LocatedIds
from nxdt_testing.contract import global_random_numbers_kept

__all__ = ["DatasetContract", "MirroredBytes", "take_steps"]

Dataset = MapDataset | IterableDataset
Content = tuple[Any, ...]

_SAMPLES = 20
_GLOBAL_BATCH = 4
_STEPS = 6


class DatasetContract:
    """Override the fixtures ``make``, ``changed`` and ``variants``."""

    predicts_the_next_token: ClassVar[bool] = True
    """False for data whose labels are not the tokens that follow."""
    stream_samples: ClassVar[int] = 200
    """Samples that are read of a stream, which should be more than one pass over the data."""

    @pytest.fixture
    def make(self) -> Callable[[], Dataset]:
        """Opens the same data again at each call; 20 samples or more."""
        raise NotImplementedError("override the fixture 'make'")

    @pytest.fixture
    def changed(self) -> Dataset:
        """Return a dataset of the same kind over other content."""
        raise NotImplementedError("override the fixture 'changed'")

    @pytest.fixture
    def variants(self) -> Mapping[str, Dataset]:
        """Return the data of ``make`` opened for other runs, by the field of their
        :class:`~nxdt_core.protocols.dataset.DataContext` that differs: ``seq_length``, ``seed`` and ``tokenizer``, as
        far as the data can be opened so. (:class:`MirroredBytes` is another tokenizer.)"""
        raise NotImplementedError("override the fixture 'variants'")

    @pytest.fixture
    def samples(self, make: Callable[[], Dataset]) -> list[Sample]:
        """Return the first samples of the dataset."""
        samples = _first(make(), _SAMPLES)
        assert len(samples) == _SAMPLES, (
            f"the fixture 'make' opens {len(samples)} samples, and the contract needs {_SAMPLES}; open more data"
        )
        return samples

    @pytest.fixture
    def by_index(self, make: Callable[[], Dataset]) -> MapDataset:
        """Return the dataset where it is map-style; tests of indices are skipped for others."""
        dataset = make()
        if not isinstance(dataset, MapDataset):
            pytest.skip("it has its own order")
        return dataset

    @pytest.fixture
    def stream(self, make: Callable[[], Dataset]) -> IterableDataset:
        """Return the dataset where it has its own order; tests of its state are skipped for others."""
        dataset = make()
        if isinstance(dataset, MapDataset):
            pytest.skip("its samples are found by index")
        return dataset

    # Samples

    def test_it_has_the_members_of_a_protocol(self, make: Callable[[], Dataset]) -> None:
        """The dataset inherits from MapDataset or from IterableDataset."""
        assert isinstance(make(), (MapDataset, IterableDataset)), (
            "inherit from MapDataset or IterableDataset of nxdt_core.protocols.dataset"
        )

    def test_samples_are_arrays_of_one_shape(self, samples: list[Sample]) -> None:
        """int64, weights float32, every field as long as the tokens, in all samples."""
        shape = samples[0].input_ids.shape
        for sample in samples:
            for field in (sample.input_ids, sample.labels, sample.position_ids, sample.document_ids):
                assert field is None or (field.shape, field.dtype.name) == (shape, "int64")
            weights = sample.loss_weights
            assert weights is None or (weights.shape, weights.dtype.name) == (shape, "float32")

    def test_labels_are_tokens_or_ignored(self, samples: list[Sample]) -> None:
        """Each label is an id of the vocabulary or -100, and some labels are learnt."""
        labels = np.concatenate([sample.labels.ravel() for sample in samples])
        assert ((labels >= 0) | (labels == IGNORE_INDEX)).all()
        assert (labels >= 0).any()

    def test_a_label_is_the_token_that_follows(self, samples: list[Sample]) -> None:
        """Shifted once, by the dataset."""
        if not self.predicts_the_next_token:
            pytest.skip("its labels are something else")
        for sample in samples:
            ids, labels = np.atleast_2d(sample.input_ids), np.atleast_2d(sample.labels)
            learnt = labels[:, :-1] >= 0
            if sample.document_ids is not None:  # what follows before padding is not among the inputs
                learnt &= np.atleast_2d(sample.document_ids)[:, 1:] >= 0
            assert (labels[:, :-1] == ids[:, 1:])[learnt].all()

    def test_nothing_is_learnt_across_documents_or_of_padding(self, samples: list[Sample]) -> None:
        """A document's last token has no label that belongs to the next."""
        for sample in samples:
            if sample.document_ids is not None:
                documents, labels = np.atleast_2d(sample.document_ids), np.atleast_2d(sample.labels)
                assert (labels[documents < 0] == IGNORE_INDEX).all()
                last = (documents[:, 1:] != documents[:, :-1]) & (documents[:, 1:] >= 0)
                assert (labels[:, :-1][last] == IGNORE_INDEX).all()

    def test_positions_rise_by_one_within_a_document(self, samples: list[Sample]) -> None:
        """Positions may begin at any number."""
        for sample in samples:
            if sample.position_ids is not None and sample.document_ids is not None:
                places, documents = np.atleast_2d(sample.position_ids), np.atleast_2d(sample.document_ids)
                inner = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
                assert (np.diff(places, axis=1)[inner] == 1).all()

    # What decides them

    def test_data_opened_twice_are_the_same(self, make: Callable[[], Dataset], samples: list[Sample]) -> None:
        """Fingerprint and samples do not depend on earlier reads."""
        first, second = make(), make()
        _first(first, 3)
        assert first.fingerprint() == first.fingerprint() == second.fingerprint()
        assert _contents(_first(second, _SAMPLES)) == _contents(samples)

    def test_reading_leaves_the_global_random_numbers_alone(self, make: Callable[[], Dataset]) -> None:
        """Dropout and other data draw from them; a thread that reads ahead would change what they get."""
        with global_random_numbers_kept("reading samples changes"):
            _first(make(), _SAMPLES)

    def test_other_content_has_another_fingerprint(self, make: Callable[[], Dataset], changed: Dataset) -> None:
        """On resume nothing else tells them apart."""
        assert make().fingerprint() != changed.fingerprint()

    def test_a_run_with_other_samples_has_another_fingerprint(
        self, make: Callable[[], Dataset], samples: list[Sample], variants: Mapping[str, Dataset]
    ) -> None:
        """Samples that follow from the run's sequence length, seed or tokenizer are not taken for those of another."""
        assert variants, "open the data for another run at least once"
        for field, variant in variants.items():
            if _contents(_first(variant, _SAMPLES)) != _contents(samples):
                assert variant.fingerprint() != make().fingerprint(), (
                    f"another {field} gives other samples and the same fingerprint, so that a run resumes on them"
                )

    def test_an_index_alone_decides_the_sample(self, by_index: MapDataset, samples: list[Sample]) -> None:
        """In any order, again, and from several threads at once."""
        backwards = [by_index[index] for index in reversed(range(_SAMPLES))]
        assert _contents(backwards[::-1]) == _contents(samples)
        with ThreadPoolExecutor(4) as pool:
            assert _contents(list(pool.map(by_index.__getitem__, list(range(_SAMPLES)) * 3))) == _contents(samples) * 3

    def test_indices_end_at_the_length(self, by_index: MapDataset) -> None:
        """Beyond there is an ``IndexError``, not a sample that another index has."""
        assert by_index[len(by_index) - 1]
        for index in (len(by_index), -1):
            with pytest.raises(IndexError):
                by_index[index]

    def test_every_rank_reads_the_same(
        self, make: Callable[[], Dataset], samples: list[Sample], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The core gives each rank its part of a batch; a dataset that takes a part itself would lose samples."""
        fingerprint = make().fingerprint()
        for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        dataset = make()
        assert _contents(_first(dataset, _SAMPLES)) == _contents(samples), (
            "rank 1 of 2 reads other samples than a run of one process; leave the ranks' parts to the core"
        )
        assert dataset.fingerprint() == fingerprint, "rank 1 of 2 has another fingerprint than a run of one process"

    # Position of a run

    def test_a_stream_resumes_behind_any_sample(self, stream: IterableDataset, make: Callable[[], Dataset]) -> None:
        """From its state alone, which JSON can hold, in a dataset that has read nothing; also in a later pass."""
        whole, returned, states = [], [], []
        for sample in islice(stream, self.stream_samples):
            whole.append(_content(sample))
            returned.append(stream.state_dict())
            states.append(json.dumps(returned[-1]))
        assert [json.dumps(state) for state in returned] == states, (
            "a state changes when the stream is read further: return a copy"
        )
        step = max(1, len(whole) // _SAMPLES)
        for place in sorted({*range(min(_SAMPLES, len(whole)) - 1), *range(0, len(whole) - 1, step)}):
            state = states[place]
            resumed = make()
            assert not isinstance(resumed, MapDataset)
            resumed.load_state_dict(json.loads(state))
            assert json.dumps(resumed.state_dict()) == state
            assert _content(next(iter(resumed))) == whole[place + 1], (
                f"behind sample {place} of a stream, its state gives another sample than the one that followed"
            )

    def test_a_run_resumes_on_other_ranks_and_threads(self, make: Callable[[], Dataset]) -> None:
        """A run that is resumed at any step, on other ranks and threads, gets the batches that it would have got."""
        whole, _ = _run(make(), _STEPS)
        for stop in (1, 3, _STEPS - 1):
            begun, state = _run(make(), stop, workers=2)
            assert begun == whole[:stop]
            ranks = [_run(make(), _STEPS - stop, rank, 2, state=state, workers=rank)[0] for rank in range(2)]
            assert [first + second for first, second in zip(*ranks, strict=True)] == whole[stop:]


class MirroredBytes(ByteTokenizer):
    """Another tokenizer than the one of bytes, which makes as many ids of a text."""

    def encode(self, text: str) -> list[int]:
        """Return 255 less each byte of the text."""
        return [255 - byte for byte in super().encode(text)]

    def encode_to_arrays(self, texts: Sequence[str]) -> Iterator[NDArray[np.uint8]]:
        """Yield the ids of each text as an array."""
        return (255 - ids for ids in super().encode_to_arrays(texts))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids."""
        return super().decode(255 - token if token < 256 else token for token in ids)

    def locate(self, texts: Sequence[str]) -> list[LocatedIds]:
        """Return the ids of each text with their places in it."""
        return [replace(located, ids=255 - np.asarray(located.ids)) for located in super().locate(texts)]

    def fingerprint(self) -> str:
        """Return the digest of what decides the ids."""
        return f"mirrored {super().fingerprint()}"


def _first(dataset: Dataset, count: int) -> list[Sample]:
    if isinstance(dataset, MapDataset):
        return [dataset[index] for index in range(min(count, len(dataset)))]
    return list(islice(dataset, count))


def _content(sample: Sample | Batch) -> Content:
    fields = (sample.input_ids, sample.labels, sample.loss_weights, sample.position_ids, sample.document_ids)
    return tuple(None if field is None else field.tolist() for field in fields)


def _contents(samples: Sequence[Sample]) -> list[Content]:
    return [_content(sample) for sample in samples]


def take_steps(
    dataset: Dataset,
    count: int,
    *,
    rank: int | None = None,
    size: int | None = None,
    state: dict[str, Any] | None = None,
    workers: int = 0,
    **batch: Any,
) -> tuple[list[list[Batch]], dict[str, Any]]:
    """Return the micro-batches of ``count`` shuffled steps from ``state`` on, and the state after them.

    ``rank`` is one of ``size`` data parallel ranks, ``workers`` a number of threads; ``batch`` has
    ``global_batch_size``, ``micro_batch_size`` and ``seed``.
    """
    loader = GlobalBatchLoader(
        dataset, shuffle=True, dp_rank=rank, dp_size=size, num_workers=workers, **{"micro_batch_size": 1, **batch}
    )
    if state is not None:
        loader.load_state_dict(state)
    steps = [list(batches) for batches in islice(loader, count)]
    loader.close()
    return steps, json.loads(json.dumps(loader.state_dict()))


def _run(dataset: Dataset, steps: int, rank: int = 0, size: int = 1, **more: Any) -> tuple[Any, dict[str, Any]]:
    """The samples that this rank sees at each step, and the state behind them."""
    settings = {"global_batch_size": _GLOBAL_BATCH, "seed": 5, "rank": rank, "size": size, **more}
    batches, behind = take_steps(dataset, steps, **settings)
    rows = [[(batch, row) for batch in step for row in range(len(batch.input_ids))] for step in batches]
    return [[_content(batch.map(lambda field: field[row])) for batch, row in step] for step in rows], behind  # noqa: B023
