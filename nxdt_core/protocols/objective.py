"""Kind ``objective``: turns a model's outputs and a batch into a loss.

Example::

    class Squared:
        def __call__(self, logits, batch, step):
            ...
            return ObjectiveOutput(loss_sum=loss.sum(), weight=batch.weight())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from nxdt_core.errors.models import ObjectiveWeightsDiffer
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.step_context import StepContext

if TYPE_CHECKING:
    import torch

__all__ = [
    "GeneratingObjective",
    "Objective",
    "ObjectiveOutput",
    "ObjectiveTraits",
    "TaughtObjective",
    "check_weight",
    "traits_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOutput:
    """Loss of one micro-batch, not averaged: the step divides by the weight of the whole global batch."""

    loss_sum: torch.Tensor
    """With gradient: weighted sum over this micro-batch. A scalar, or [terms] of a loss that adds up means over
    different things, such as one over tokens and one over pairs."""
    weight: torch.Tensor
    """What the sum would be divided by, mostly the number of loss tokens; as many as ``loss_sum``."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Detached sums like ``loss_sum``, logged after the same division; a scalar is divided by the first weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveTraits:
    """What surrounds the steps of a run must know of a loss."""

    unit: str = "tokens"
    """What the loss is a mean over. Of tokens, its exponential is a perplexity."""
    rows_per_sample: int = 1
    """Rows of a sample that it takes."""
    samples: str = ""
    """What the samples of a global batch are, such as ``prompts x 8 answers``; empty: sequences, or several rows."""
    answers: int = 0
    """Rows that the model writes for each sample before a step, so that ``nxdt plan`` counts the cache of keys and
    values."""
    values: tuple[str, ...] = ()
    """Names of the :attr:`~nxdt_core.protocols.batch.Batch.values` that it takes."""
    reference: Literal["before", "step"] | None = None
    """Whether it wants the log-probabilities of the labels under another model: ``before`` the first step, under the
    weights that the run begins with; or at each ``step``, under the frozen base of an adapter."""
    head: Literal["vocabulary", "score"] = "vocabulary"
    """What its call takes: logits [rows, seq, vocab], or scores [rows, seq, 1] of a model whose section has
    ``score_head``."""
    loss_rows: int | None = None
    """Rows of a sample that its call takes, the first ones, where its ``prepare`` leaves out others; None: all."""

    def batch(self, samples: int, seq_length: int) -> str:
        """Return a description of a global batch: ``32 sequences of 128``."""
        rows = "sequences" if self.rows_per_sample == 1 else f"samples x {self.rows_per_sample} rows"
        return f"{samples:,} {self.samples or rows} of {seq_length:,}"


@runtime_checkable
class Objective(Protocol):
    """The target of the kind, called as ``Target(config)`` with the section ``objective``.

    One that is not a mean over tokens, or compares, says so in an attribute ``traits``, an :class:`ObjectiveTraits`.
    One whose loss needs a figure of the whole global batch has a method ``prepare``
    (:func:`nxdt_core.protocols.parallel_model.prepare`). One that compares more than the labels may have a method
    ``head_loss`` (:attr:`nxdt_core.protocols.step_context.StepContext.head_loss`) for ``model.loss_chunk_tokens``.
    """

    def __init__(self, config: Any) -> None: ...

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return the weight that ``__call__`` will report for ``batch``, known before the forward pass, so that each
        micro-batch's loss can be divided by the global weight at once. Of the whole batch, also where ``__call__``
        will get some tokens of each sequence (:class:`~nxdt_core.protocols.step_context.SequenceShards`)."""
        ...

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """``logits`` [micro_batch, seq, vocab] in the compute dtype. Under tensor parallelism they are sharded:
        pass them, with ``step``, to ``cross_entropies``, ``log_probs`` or ``log_partition`` of
        ``nxdt_core.models.loss``
        alone. A loss with sums over whole sequences takes them from ``step.sequences``, since ranks may share each
        sequence. An objective that needs neither may lack the parameter ``step``."""
        ...


@runtime_checkable
class GeneratingObjective(Protocol):
    """An :class:`Objective` that makes what it is computed on with the model of the run."""

    def generate(self, session: Any, micro_batches: Sequence[Batch], *, train: bool) -> tuple[Sequence[Batch], Any]:
        """Return as many micro-batches for those of the data, of one shape, and what a resumed run needs to make those
        of the next step. Collective.

        Args:
            session: the run's :class:`~nxdt_core.train.session.TrainSession`, before the step.
                ``session.state.data["generated"]`` is what the step before returned.
            micro_batches: this rank's, of the data.
            train: False in a validation.

        Returns:
            The micro-batches, and a JSON-able value, equal on all ranks; None for nothing.
        """
        ...


@runtime_checkable
class TaughtObjective(Protocol):
    """An :class:`Objective` that compares the model of the run with another one, which does not train.

    Its record requires the capability ``frozen_model`` of the engine. It runs the other model in its ``prepare`` or in
    its call, where that is not a pipeline's.
    """

    @property
    def teacher(self) -> str:
        """Address of the other model, as of :func:`~nxdt_core.train.weights.found.find_weights`."""
        ...

    @property
    def teacher_config(self) -> str | None:
        """YAML file or ``recipe:NAME`` that decides in place of the configuration at that address; None: nothing."""
        ...

    def check_teacher(self, run: Any, config: Any) -> None:
        """Check that the model of ``run`` can be compared with that of ``config``, the run's
        (:class:`~nxdt_core.config.ResolvedConfig`).

        Raises:
            NxdtError: it cannot.
        """
        ...

    def take_teacher(self, teacher: Any, *, pipelined: bool) -> None:
        """Take the other model (:class:`~nxdt_core.protocols.parallel_model.ParallelModel`), in the layout of the run.

        Args:
            teacher: with its weights.
            pipelined: whether its layers are distributed over the stages of a pipeline, so that all ranks run it
                together, before any of them has logits of the run's model.
        """
        ...

    def kept_bytes(self, logits: torch.Tensor) -> int:
        """Return the bytes that it keeps of the other model's ``logits`` of one micro-batch."""
        ...


def traits_of(objective: Objective) -> ObjectiveTraits:
    """Return the traits of ``objective``; the default are those of a mean over tokens."""
    found: ObjectiveTraits = getattr(objective, "traits", ObjectiveTraits())
    return found


def check_weight(objective: Objective, output: ObjectiveOutput, batch: Batch) -> None:
    """Check that ``objective`` announces the weight of ``output``, which it returned for ``batch``.

    Raises:
        ObjectiveWeightsDiffer: it announces another one.
    """
    reported = output.weight.detach()
    given = objective.weight(batch).to(reported)
    if given.shape != reported.shape or not given.allclose(reported, rtol=1e-5):
        raise ObjectiveWeightsDiffer(
            objective=type(objective).__name__, reported=reported.tolist(), given=given.tolist()
        )
