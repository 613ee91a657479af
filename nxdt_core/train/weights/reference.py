"""Log-probabilities under the weights that a run begins with: computed before its first step, kept in its directory.

They are stored by the sample's number, so that no shuffling, packing or layout can assign them to another sample.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from nxdt_core.config import ResolvedConfig
from nxdt_core.data.cache import digest
from nxdt_core.distributed.devices import HOST
from nxdt_core.errors.training import ReferenceLost, ReferenceNeedsAdapter
from nxdt_core.models.loss import log_probs
from nxdt_core.models.updates import updates_off
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch, Sample
from nxdt_core.protocols.dataset import MapDataset
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.system.regular_files import make_directory, regular_opener, replacing
from nxdt_core.train import build
from nxdt_core.train.build import run_dir_explained

if TYPE_CHECKING:
    from nxdt_core.checkpoint import Manifest

_log = logging.getLogger(__name__)
_DIRECTORY = "reference"
_DAMAGED = (BadZipFile, EOFError, KeyError, OverflowError, RuntimeError, TokenError, TypeError, ValueError)
"""Exceptions that numpy raises for bytes that it did not write."""


class LogProbs:
    """Log-probabilities of the labels that count, of every sample of a dataset.

    Args:
        values: float32, of sample after sample.
        counts: how many of each sample.
    """

    def __init__(self, values: NDArray[np.float32], counts: NDArray[np.int64]) -> None:
        self.values, self.counts = values, counts
        self._ends = np.cumsum(counts)

    def of(self, index: int) -> NDArray[np.float32]:
        """Return the log-probabilities [seq] of one sample."""
        end = self._ends[index]
        return self.values[end - self.counts[index] : end]


class DatasetWithReference(MapDataset):
    """A dataset whose samples have ``reference_log_probs``.

    Args:
        dataset: the samples.
        log_probs: log-probabilities of the labels of each sample.
        model: digest of what the log-probabilities were computed with.
    """

    def __init__(self, dataset: MapDataset, log_probs: LogProbs, *, model: str) -> None:
        self._dataset = dataset
        self._log_probs = log_probs
        self._model = model

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> Sample:
        sample = self._dataset[index]
        values = np.zeros(sample.labels.shape, dtype=np.float32)
        values[weighted_labels(sample)] = self._log_probs.of(index)
        return replace(sample, reference_log_probs=values)

    def fingerprint(self) -> str:
        """Return a digest of the dataset's fingerprint and of the reference model."""
        return digest("referenced", self._dataset.fingerprint(), self._model)


def weighted_labels(sample: Sample) -> NDArray[np.bool_]:
    """Return which labels of a sample count in the loss."""
    labelled: NDArray[np.bool_] = sample.labels != IGNORE_INDEX
    return labelled if sample.loss_weights is None else np.logical_and(labelled, sample.loss_weights > 0)


def with_reference(
    dataset: MapDataset,
    *,
    config: ResolvedConfig,
    engine: ParallelEngine,
    model: ParallelModel,
    weights: str | None,
) -> DatasetWithReference:
    """Return ``dataset`` with the log-probabilities of its labels under ``model``, from the run's directory if stored.

    Collective; call it before the first step.

    Args:
        dataset: the samples of a split.
        config: the resolved configuration of the run.
        engine: the parallel engine that has laid out ``model``.
        model: with the weights that the run begins with.
        weights: digest of where those come from; None in a resumed run, whose weights have changed since.

    Raises:
        ReferenceLost: the run is resumed, and the file is missing or damaged.
        CannotWriteRunDirectory: the file cannot be written.
    """
    weights = engine.ranks.broadcast_object(weights)  # it may differ between machines, as file times do
    path = config.run_dir / _DIRECTORY / f"{dataset.fingerprint()}.npz"

    def read() -> tuple[str, LogProbs] | None:
        """Return the digest and the values in the file; None where it is missing, or damaged: arrays have a CRC-32."""
        try:
            with (
                run_dir_explained(config),
                suppress(FileNotFoundError),
                open(path, "rb", opener=regular_opener) as file,
                np.load(file, allow_pickle=False) as arrays,
            ):
                digest_of_weights, values, counts = str(arrays["weights"]), arrays["values"], arrays["counts"]
                if counts.shape != (len(dataset),) or counts.min(initial=0) < 0 or counts.sum() != len(values):
                    raise ValueError(f"it does not hold the values of {len(dataset)} samples")
                return digest_of_weights, LogProbs(values, counts)
        except _DAMAGED as error:
            _log.warning("%s is damaged: %s", path, error)
        return None

    stored = engine.ranks.on_rank_zero(read)
    if stored is not None and weights in (None, stored[0]):
        return DatasetWithReference(dataset, stored[1], model=stored[0])
    if weights is None:
        raise ReferenceLost(path=str(path))
    _log.info("computing reference log-probabilities of %d samples", len(dataset))
    computed = compute_log_probs(dataset, config=config, engine=engine, model=model)

    def write() -> None:
        with run_dir_explained(config):
            for part in make_directory(path.parent).glob(".nxdt-*.part"):  # of a run that was killed: this one owns it
                part.unlink(missing_ok=True)
            with replacing(path) as file:
                np.savez(file, weights=np.array(weights), values=computed.values, counts=computed.counts)
                file.flush()
                os.fsync(file.fileno())

    engine.ranks.on_rank_zero(write)
    return DatasetWithReference(dataset, computed, model=weights)


def compute_log_probs(
    dataset: MapDataset, *, config: ResolvedConfig, engine: ParallelEngine, model: ParallelModel
) -> LogProbs:
    """Return the log-probabilities of the labels that count, of every sample; equal on all ranks. Collective."""
    place, data = engine.rank_info, config.run.data
    loader = build.batches(config, engine, dataset, repeat=False)
    share = data.global_batch_size // place.dp_size
    by_sample: dict[int, NDArray[np.float32]] = {}
    steps = range(-(-len(dataset) // data.global_batch_size))
    shown = tqdm(loader, total=len(steps), desc="reference", unit="batch", disable=None if place.rank == 0 else True)
    for step, micro_batches in zip(steps, shown, strict=True):
        first = step * data.global_batch_size + place.dp_rank * share
        of_samples: list[NDArray[np.float32]] = []  # of each sample's labels, in the samples' own shape
        for batch, rows in zip(micro_batches, model.log_probs(micro_batches), strict=True):
            parts = np.split(rows.float().to(HOST).numpy(), batch.samples)
            of_samples += [part if batch.rows_per_sample > 1 else part[0] for part in parts]
        for index, values in enumerate(of_samples, start=first):
            if index < min(len(dataset), first + share):  # blank samples fill the last batch up
                by_sample[index] = values[weighted_labels(dataset[index])]
    readers = engine.ranks.all_gather_object(engine.rank_info.dp_rank)
    first = readers.index(engine.rank_info.dp_rank) == engine.ranks.rank  # of the ranks that read these samples
    of_ranks = engine.ranks.all_gather_object(by_sample if first else {})
    gathered = {index: values for part in of_ranks for index, values in part.items()}
    in_order = [gathered[index] for index in range(len(gathered))]
    return LogProbs(np.concatenate(in_order), np.array([len(values) for values in in_order], dtype=np.int64))


def check_base_frozen(model: ParallelModel, objective: str) -> None:
    """Let a model pass whose own weights do not change: what trains was added by adapters.

    Raises:
        ReferenceNeedsAdapter: others train, too, or nothing was added.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not model.added or trained - model.added:
        raise ReferenceNeedsAdapter(objective=objective, trained=sorted(trained - model.added))


def with_base(micro_batches: Sequence[Batch], model: ParallelModel, *, temperature: float = 1.0) -> list[Batch]:
    """Return the batches with the log-probabilities of their labels under the model without its adapters, whose logits
    ``temperature`` divides. Collective."""
    with updates_off(model.local_modules()):
        base_log_probs = model.log_probs(micro_batches, partial(log_probs, temperature=temperature))
    return [
        replace(batch, reference_log_probs=values.to(batch.labels.device))
        for batch, values in zip(micro_batches, base_log_probs, strict=True)
    ]


def first_weights_digest(config: ResolvedConfig, source: Manifest | Path | None) -> str:
    """Return the digest of what a new run takes its first weights from.

    Args:
        config: the resolved configuration of the run.
        source: checkpoint with the weights, or the path of another program's; None where they are fresh.
    """
    sections = config.to_values()
    changed = (config.run.seed, sections["adapter"])
    if source is None:
        return digest("fresh", changed, sections["model"])
    if not isinstance(source, Path):
        return digest("checkpoint", changed, source.attempt)
    files = sorted(path for path in source.rglob("*") if path.is_file())
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return digest("foreign", changed, str(source.resolve()), *stats)
