"""The bytes of one rank at the fullest moment of a step, by what they are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from nxdt_core.distributed.collectives import BUCKET_BYTES
from nxdt_core.engine.estimate.trace import GradientUse, MicroBatchTrace
from nxdt_core.engine.estimate.weights import ParameterCounts
from nxdt_core.engine.pipeline.schedules import Operation
from nxdt_core.protocols.estimate import Memory
from nxdt_core.protocols.precision import DType, PrecisionPolicy

_BYTES: Mapping[DType, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLayout:
    """Sharding of parameters, gradients and optimizer state over the ranks, and the dtype of each."""

    policy: PrecisionPolicy
    zero_stage: int
    sharded: bool
    """FSDP2 holds the parameters."""
    replicated: bool
    """Other ranks hold the same parameters, unless these are sharded."""
    accumulates: bool
    """A step has several micro-batches."""
    stand_ins: bool = False
    """The optimizer works on float32 stand-ins of weights that are rounded."""

    @property
    def compute_bytes(self) -> int:
        """Return the bytes per element of a parameter in forward and backward."""
        return _BYTES[self.policy.parameters]

    @property
    def product_bytes(self) -> int:
        """Return the bytes per element of what matrix products compute with."""
        return _BYTES[self.policy.autocast or self.policy.parameters]

    @property
    def stored_bytes(self) -> int:
        """Return the bytes per element of a trained parameter in storage; a frozen one has its dtype in forward."""
        return _BYTES["float32"] if self.policy.master_weights else self.compute_bytes

    def saved_bytes(self, stored: int, *, bfloat16: bool) -> int:
        """Return the bytes in a checkpoint per element of a parameter of ``stored`` bytes; with ``bfloat16`` wider
        weights are saved in it too."""
        return stored + (_BYTES["bfloat16"] if bfloat16 and stored > _BYTES["bfloat16"] else 0)

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes per element of an accumulated gradient."""
        return _BYTES[self.policy.gradients]

    @property
    def copied(self) -> bool:
        """Return whether masters have copies that are computed with, without FSDP2."""
        return self.policy.master_weights and not self.sharded

    @property
    def gradient_use(self) -> GradientUse:
        """Return what happens to a micro-batch's gradients."""
        if self.sharded and (self.zero_stage >= 2 or not self.accumulates):
            return "sharded"
        if not self.accumulates:
            return "fresh"
        return "sharded" if self.copied else "accumulated"  # copies' are added to those of the masters


def peak_memory(
    counts: ParameterCounts,
    storage: StorageLayout,
    order: Iterable[Operation],
    traces: Mapping[int, MicroBatchTrace],
    received: int,
) -> Memory:
    """Return the largest of four moments: the worst one of forward and backward, the first and the last reduction of
    gradients, and the update where that works on float32 stand-ins of rounded weights.

    Args:
        counts: parameters of all stages of the rank.
        storage: their layout.
        order: what the rank does in a step.
        traces: one micro-batch through each of the rank's stages, by stage.
        received: bytes of a micro-batch's hidden states that come from another rank; held like activations.
    """
    computing = Memory(**_computing(counts, storage), **_in_flight(order, traces, received))
    if storage.gradient_use == "fresh":
        computing = replace(computing, gradients=sum(trace.peak["gradients"] for trace in traces.values()))
    moments = (
        computing,
        _reducing_first(counts, storage, computing),
        _reducing(counts, storage),
        _updating(counts, storage),
    )
    return max(moments, key=lambda moment: moment.total)


def _computing(counts: ParameterCounts, storage: StorageLayout) -> dict[str, int]:
    """Return the bytes in memory while micro-batches run."""
    weights, optimizer = _between_steps(counts, storage, computing=True)
    largest = sum(counts.groups[:1])
    gradients, communication = counts.trained * storage.gradient_bytes, 0
    if storage.copied:
        weights += counts.trained * storage.compute_bytes
    if storage.sharded:
        gathered = _gathered_at_a_time(counts)
        if storage.zero_stage < 3:
            gathered = counts.local - counts.experts_kept - counts.coded
        weights += _computed_with(gathered, counts, storage)
        if storage.gradient_use == "sharded":
            # Gradients of the root are reduced last. The head's are among them where it is tied to the embedding.
            gradients = counts.trained_stored * storage.gradient_bytes + counts.root * storage.compute_bytes
            communication = largest * storage.gradient_bytes
        if storage.zero_stage == 3:
            communication += _computed_with(largest, counts, storage)
            # What travels in autocast's dtype is kept in it until it is unpacked.
            travelling = 0 if counts.frozen_narrow else counts.narrow
            communication += largest * storage.product_bytes * travelling // max(counts.local, 1)
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "communication": communication}


def _gathered_at_a_time(counts: ParameterCounts) -> int:
    """Elements of which ZeRO-3 holds the whole: the root, the part at work and the one that is fetched ahead."""
    largest, two = sum(counts.groups[:1]), sum(counts.groups[:2])
    return counts.root + max(two, largest + max(counts.first, counts.last))


def gathered_bytes(counts: ParameterCounts, storage: StorageLayout) -> int:
    """Return the bytes of gathered weights while a frozen model runs forward; 0 where none are sharded."""
    return _computed_with(_gathered_at_a_time(counts), counts, storage) if storage.sharded else 0


def _computed_with(elements: int, counts: ParameterCounts, storage: StorageLayout) -> int:
    """Bytes of gathered elements, of which as many are frozen in autocast's dtype as among all."""
    saved = (storage.compute_bytes - storage.product_bytes) * counts.frozen_narrow
    return elements * storage.compute_bytes - elements * saved // max(counts.local - counts.coded, 1)


def _between_steps(counts: ParameterCounts, storage: StorageLayout, *, computing: bool = False) -> tuple[int, int]:
    """Return the bytes of stored weights, and of optimizer state with masters. Masters that are rounded in place have a
    copy while the rank is ``computing``."""
    frozen = counts.frozen_bytes
    trained = counts.trained_stored * storage.stored_bytes
    state = round(counts.state)
    if not storage.policy.master_weights:
        return frozen + trained, state
    copies = 2 if computing and storage.policy.stochastic_rounding else 1
    return frozen, copies * trained + state


def _reducing_first(counts: ParameterCounts, storage: StorageLayout, computing: Memory) -> Memory:
    """Return the memory when FSDP2 reduces the modules behind the layers first: the logits are freed, all activations
    are kept, and gradients are reduced from a flat copy into this rank's shard."""
    if not storage.sharded:
        return computing
    shard = storage.gradient_bytes * counts.trained_stored / max(counts.trained, 1)
    whole = storage.compute_bytes if storage.gradient_use == "sharded" else shard
    flat = round(counts.last * (storage.gradient_bytes + whole))
    return replace(computing, logits=0, workspace=0, communication=flat)


def _reducing(counts: ParameterCounts, storage: StorageLayout) -> Memory:
    """Return the memory when the last gradients are reduced from flat copies, after the activations are freed: by FSDP2
    those of the embedding and the root, without it all of them, a bucket at a time."""
    weights, optimizer = _between_steps(counts, storage, computing=True)
    if not storage.sharded:
        gradients = counts.trained * storage.gradient_bytes
        flat = min(gradients, BUCKET_BYTES) if storage.replicated else 0
        if storage.copied:
            weights += counts.trained * storage.compute_bytes
        return Memory(weights=weights, gradients=gradients, optimizer=optimizer, communication=flat)
    remaining = counts.first + counts.root
    return Memory(
        weights=weights + counts.root * storage.compute_bytes,
        gradients=(counts.trained_stored + remaining) * storage.gradient_bytes,
        optimizer=optimizer,
        communication=max(counts.first, counts.root) * storage.gradient_bytes,
    )


def _updating(counts: ParameterCounts, storage: StorageLayout) -> Memory:
    """Return the memory of the update; stand-ins add a bucket of weights and gradients in float32, and of narrower
    state."""
    weights, optimizer = _between_steps(counts, storage)
    gradients = (counts.trained_stored if storage.sharded else counts.trained) * storage.gradient_bytes
    widened = 0.0
    if storage.stand_ins:
        widened = 2 * _BYTES["float32"]
        if storage.policy.optimizer_state == "bfloat16":
            widened += counts.state / max(counts.trained_stored, 1)
    return Memory(weights=weights, gradients=gradients, optimizer=optimizer, workspace=round(counts.bucket * widened))


def _in_flight(order: Iterable[Operation], traces: Mapping[int, MicroBatchTrace], received: int) -> dict[str, int]:
    """Return activations, logits and workspace at the fullest moment of the schedule.

    A backward in two passes keeps its activations until the second.
    """
    total, worst = 0, {"activations": 0, "logits": 0, "workspace": 0}
    for operation in order:
        trace = traces[operation.stage]
        added = trace.kept + (received if operation.stage > 0 else 0)
        if operation.kind == "forward":
            total += added
            continue
        peak = trace.peak
        moment = {
            "activations": total - trace.kept + peak["activations"],
            "logits": peak["logits"],
            "workspace": peak["workspace"],
        }
        if sum(moment.values()) > sum(worst.values()):
            worst = moment
        if operation.kind != "backward_input":
            total -= added
    return worst
