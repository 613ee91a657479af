"""Bytes that a rank sends in a step: what was measured on a micro-batch, and what comes once a step.

Lower bounds by ring algorithms, as in :class:`nxdt_core.engine.estimate.live.WireBytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from nxdt_core.engine.estimate.memory import Storage
from nxdt_core.engine.estimate.rank import MeasuredRank
from nxdt_core.engine.estimate.weights import ParameterCounts
from nxdt_core.engine.estimate.workload import Workload
from nxdt_core.protocols.parallel.mesh import MeshSizes
from nxdt_core.protocols.parallel.pipeline_schedules import rank_of_stage

__all__ = ["sent_in_a_step"]

_SCALE_BYTES = 4
"""Of the largest element of a weight that travels in one byte per element, which ranks find together once per step."""


def sent_in_a_step(
    measured: MeasuredRank, work: Workload, storage: Storage, stages: tuple[int, ...]
) -> Mapping[str, int]:
    """Return the bytes by dimension (``tp``, ``cp``, ``ep``, ``token_shuffle``, ``pp``, ``dp``), without those that
    send none."""
    sent: Counter[str] = Counter()
    for trace in measured.traces:
        for dimension, size in trace.sent.items():
            sent[dimension] += size * work.micro_batches
    hops = sum(_hops(stage, work.sizes) for stage in stages)
    sent["pp"] += hops * work.hidden_bytes(measured.hidden_size) * work.micro_batches
    sent["tp"] += round(2 * _share(work.sizes.tp) * measured.counts.partial * storage.gradient_bytes)
    sent["dp"] += round(sum(_data(measured.counts, work.sizes, storage, work.micro_batches)))
    return {dimension: size for dimension, size in sent.items() if size}


def _hops(stage: int, sizes: MeshSizes) -> int:
    """Messages of a micro-batch that leave the rank of ``stage``: hidden states onwards, their gradients back."""
    here = rank_of_stage(stage, sizes.pp, sizes.schedule)
    neighbours = [other for other in (stage - 1, stage + 1) if 0 <= other < sizes.stages]
    return sum(rank_of_stage(other, sizes.pp, sizes.schedule) != here for other in neighbours)


def _data(counts: ParameterCounts, sizes: MeshSizes, storage: Storage, micro_batches: int) -> Iterator[float]:
    """Gathering weights and reducing gradients over the ranks that hold the same part of the model."""
    experts = (counts.experts, counts.experts_narrow, counts.experts_trained)
    dense = (counts.local - experts[0] - counts.scaled, counts.narrow - experts[1], counts.trained - experts[2])
    for (local, narrow, trained), ranks in ((dense, sizes.fsdp), (experts, sizes.efsdp)):
        gradients = trained * storage.gradient_bytes
        if not storage.sharded:
            yield 2 * _share(ranks * sizes.dp_replicate) * gradients
            continue
        each_time = storage.zero_stage >= 2
        gathers = 2 * micro_batches if storage.zero_stage == 3 else 1
        yield _share(ranks) * gathers * _travelling(local, narrow, storage)
        yield _share(ranks) * gradients * (micro_batches if each_time else 1)
        yield 2 * _share(sizes.dp_replicate) * gradients / ranks
    if storage.sharded:
        gathers = 2 * micro_batches if storage.zero_stage == 3 else 1
        yield _share(sizes.fsdp) * gathers * counts.scaled
        yield 2 * _share(sizes.fsdp) * counts.scales * _SCALE_BYTES
    if storage.sharded and storage.zero_stage == 3:  # the ends are gathered in forward alone
        ends = _travelling(counts.first + counts.last, counts.ends_narrow, storage)
        yield -_share(sizes.fsdp) * micro_batches * ends


def _travelling(local: int, narrow: int, storage: Storage) -> int:
    """Bytes of ``local`` elements that are gathered, ``narrow`` of them in autocast's dtype."""
    return (local - narrow) * storage.compute_bytes + narrow * storage.product_bytes


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks
