"""Kind ``objective``: turns a model's outputs and a batch into a loss.

Example::

    class Squared(Objective):
        def __call__(self, logits, batch, step):
            ...
            return ObjectiveOutput(loss_sum=loss.sum(), weight=batch.weight())
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nxdt_core.errors.models import ObjectiveWeightsDiffer
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.step_context import StepContext

if TYPE_CHECKING:
    import torch

__all__ = ["Objective", "ObjectiveOutput", "ObjectiveTraits", "check_weight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOutput:
    """Loss of one micro-batch, not averaged: the step divides by the weight of the whole global batch."""

    loss_sum: torch.Tensor
    """With gradient: weighted sum over this micro-batch. A scalar, or [terms] of a loss that adds up means over
    different things, such as one over tokens and one over pairs."""
    weight: torch.Tensor
    """Divisor of the sum, mostly the number of loss tokens; same shape as ``loss_sum``."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Detached sums like ``loss_sum``, logged after the same division; a scalar is divided by the first weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveTraits:
    """Properties of a loss that the rest of a run depends on."""

    unit: str = "tokens"
    """Unit that the loss is a mean over. For ``tokens``, metrics include its exponential, the perplexity. A loss other
    than plain cross-entropy has none: it sets another unit, such as ``labels``."""
    rows_per_sample: int = 1
    """Rows of a sample that it takes."""
    samples: str = ""
    """Name of the samples of a global batch, such as ``prompts x 8 answers``; empty: sequences, or several rows."""
    answers: int = 0
    """Rows that the model writes for each sample before a step, so that ``nxdt plan`` counts the cache of keys and
    values."""
    values: tuple[str, ...] = ()
    """Names of the :attr:`~nxdt_core.protocols.batch.Batch.values` that it takes."""
    reference: Literal["before", "step"] | None = None
    """Time at which log-probabilities of the labels under another model are computed: ``before`` the first step, under
    the initial weights; or at each ``step``, under the frozen base of an adapter. None: never."""
    temperature: float = 1.0
    """Divisor of the logits of log-probabilities that are computed at each ``step``."""
    head: Literal["vocabulary", "score"] = "vocabulary"
    """Input of its call: logits [rows, seq, vocab], or scores [rows, seq, 1] of a model whose section has
    ``score_head``."""
    loss_rows: int | None = None
    """Rows of a sample that its call takes, the first ones, where its ``prepare`` leaves out others; None: all."""

    def batch(self, samples: int, seq_length: int) -> str:
        """Return a description of a global batch: ``32 sequences of 128``."""
        rows = "sequences" if self.rows_per_sample == 1 else f"samples x {self.rows_per_sample} rows"
        return f"{samples:,} {self.samples or rows} of {seq_length:,}"


class Objective(ABC):
    """The target of the kind, called as ``Target(config)`` with the section ``objective``."""

    traits: ObjectiveTraits = ObjectiveTraits()
    """Traits of the loss; set by an objective that is not a mean of cross-entropies over tokens, or compares with a
    reference."""
    head_loss: Callable[[Any, StepContext], torch.Tensor] | None = None
    """Method of an objective that compares more than the labels and supports ``model.loss_chunk_tokens``
    (:attr:`nxdt_core.protocols.step_context.StepContext.head_loss`)."""
    teacher: str | None = None
    """Address of a second model, which does not train, as of :func:`~nxdt_core.train.weights.loading.find_weights`. The
    record of an objective that has one requires the capability ``frozen_model`` of the engine. The objective runs the
    teacher in :meth:`prepare` or, without a pipeline, in its call."""
    teacher_key: str = "objective.teacher"
    """Key that names it, for errors."""
    teacher_config: str | None = None
    """YAML file or ``recipe:NAME`` that decides in place of the configuration at that address; None: nothing."""
    step_results: Collection[str] = ()
    """Names of attributes that hold results of the newest step for callbacks. No later step reads them, so that the
    warning of attributes that change from step to step (``NXDT-T024``) leaves them out."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return the weight that ``__call__`` will report for ``batch``, known before the forward pass, so that each
        micro-batch's loss can be divided by the global weight at once. Of the whole batch, also where ``__call__``
        will get some tokens of each sequence (:class:`~nxdt_core.protocols.step_context.SequenceShards`). Default:
        the number of loss tokens, or the sum of their ``loss_weights``."""
        return batch.weight()

    @abstractmethod
    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """``logits`` [micro_batch, seq, vocab] in the compute dtype. Under tensor parallelism they are sharded:
        pass them, with ``step``, to ``cross_entropies``, ``log_probs`` or ``log_partition`` of
        ``nxdt_core.models.loss``
        alone. A loss with sums over whole sequences takes them from ``step.sequences``, since ranks may share each
        sequence. An objective that needs neither may lack the parameter ``step``."""

    def prepare(self, micro_batches: Sequence[Batch], model: Any) -> tuple[Objective, Sequence[Batch]]:
        """Return the objective and the micro-batches of one pass over a global batch. A loss that needs a figure of
        the whole global batch may run ``model``, a :class:`~nxdt_core.protocols.parallel_model.ParallelModel`, without
        gradients here. Collective. Default: these."""
        return self, micro_batches

    def generate(self, session: Any, micro_batches: Sequence[Batch], *, train: bool) -> tuple[Sequence[Batch], Any]:
        """Return as many micro-batches for those of the data, of one shape, and what a resumed run needs to make those
        of the next step. Collective. Default: those of the data, and None.

        Args:
            session: the run's :class:`~nxdt_core.train.session.TrainSession`, before the step.
                ``session.state.data["generated"]`` is what the step before returned.
            micro_batches: this rank's, of the data.
            train: False in a validation.

        Returns:
            The micro-batches, and a JSON-able value, equal on all ranks; None for nothing.
        """
        return micro_batches, None

    def check_teacher(self, run: Any, config: Any) -> None:
        """Check that the model of ``run`` can be compared with that of ``config``, the run's
        (:class:`~nxdt_core.config.ResolvedConfig`).

        Raises:
            NxdtError: it cannot.
        """

    def take_teacher(self, teacher: Any, *, pipelined: bool) -> None:
        """Take the other model (:class:`~nxdt_core.protocols.parallel_model.ParallelModel`), in the layout of the run.

        Args:
            teacher: with its weights.
            pipelined: whether its layers are distributed over the stages of a pipeline, so that all ranks run it
                together, before any of them has logits of the run's model.
        """

    def teacher_bytes(self, logits: torch.Tensor) -> int:
        """Return the bytes that it keeps of the other model's ``logits`` of one micro-batch."""
        return 0


def check_weight(objective: Objective, output: ObjectiveOutput, batch: Batch) -> None:
    """Check that ``objective`` announces the weight of ``output``, which it returned for ``batch``.

    Raises:
        ObjectiveWeightsDiffer: it announces another one.
    """
    reported = output.weight.detach()
    announced = objective.weight(batch).to(reported)
    if announced.shape != reported.shape or not announced.allclose(reported, rtol=1e-5):
        raise ObjectiveWeightsDiffer(
            objective=type(objective).__name__, reported=reported.tolist(), given=announced.tolist()
        )
