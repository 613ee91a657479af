"""A model and its optimizer in their layout over all ranks: what a :mod:`~nxdt_core.protocols.engine` makes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.protocols.tensor_shards import LocalShard

if TYPE_CHECKING:
    import torch

__all__ = [
    "CacheUnsupported",
    "Decoding",
    "ParallelModel",
    "ParallelOptimizer",
    "Replicas",
    "StepLoss",
    "TokenChoice",
    "TokenMeasure",
]


TokenMeasure = Callable[["torch.Tensor", "torch.Tensor", StepContext], "torch.Tensor"]
"""From logits, labels and the context of a micro-batch, as an objective gets them, to a value of each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """Result of forward and backward over a global batch; scalars stay on the device."""

    loss: torch.Tensor
    """Sum over the whole global batch divided by ``weight``; equal on all ranks."""
    weight: torch.Tensor
    """Loss weight (mostly loss tokens) of the whole global batch."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Replicas(Protocol):
    """The ranks that hold the very same elements of all parameters as this one."""

    reads: bool
    """True if this rank reads a checkpoint for all of them."""

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give every rank the elements of the one that reads, in place. Collective."""


class TokenChoice(Protocol):
    """Chooses the next token of each row on the device, and writes it there."""

    state: dict[str, torch.Tensor]
    """All tensors that :meth:`choose` reads and writes, on the device; ``tokens`` int64 [rows, 1] are the last ones
    chosen. They may be replaced by others with the same values."""

    @property
    def key(self) -> Hashable:
        """All else that :meth:`choose` depends on, except the shape of logits."""

    def begin(self, columns: int) -> int:
        """Prepare the choice of at most so many columns of tokens, and return of how many."""

    def choose(self, logits: torch.Tensor) -> None:
        """Choose a token for each row of ``logits`` [rows, vocab], without a wait for the device."""

    def written(self, columns: int) -> list[list[int]]:
        """Return the columns of tokens that were chosen since :meth:`begin`."""


class CacheUnsupported(Exception):
    """A model keeps no keys and values of these texts; the reason, as the end of a sentence."""


class Decoding(ABC):
    """Rows of tokens that a model continues, with what it keeps of them."""

    device: torch.device | None = None
    """Device on which tokens are chosen, for a decoding whose host does not wait after each token; otherwise None."""

    @abstractmethod
    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [rows, vocab] of the token behind ``input_ids`` [rows, tokens], without gradients.

        First the prompts, padded on the left with any id; then one token per row and call. Collective.
        """

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Continue these rows only, in this order; one may be named several times."""

    def blocks(self, choice: TokenChoice, left: Callable[[], int], window: int) -> Iterator[list[list[int]]]:
        """Yield the next columns of tokens, several at a time, in place of further calls. All rows continue. Default:
        none, and the caller takes one token at a time.

        Args:
            choice: has chosen a token from the logits of the prompts.
            left: returns how many further columns are wanted; 0 ends the iteration.
            window: tokens that the model sees at once.
        """
        return iter(())


class ParallelModel(ABC):
    """A model in its layout."""

    replicas: Replicas | None = None
    """Ranks that had better share one reading of a checkpoint; None where each reads what it holds."""
    added: frozenset[str] = frozenset()
    """Parameters of the whole model that adapters added."""
    data_ranks: int = 1
    """Number of ranks that read different samples: ``RankInfo.dp_size``."""

    @abstractmethod
    def run_train(self, micro_batches: Sequence[Batch], objective: Objective) -> StepLoss:
        """Forward and backward over this rank's micro-batches of one global batch. Gradients come out
        reduced, and are those of the loss divided by the global weight."""

    @abstractmethod
    def run_eval(self, micro_batches: Sequence[Batch], objective: Objective) -> StepLoss:
        """Forward only, in evaluation mode, without gradients."""

    @abstractmethod
    def log_probs(self, micro_batches: Sequence[Batch], measure: TokenMeasure | None = None) -> list[torch.Tensor]:
        """Return the log-probability of each label of these micro-batches, [rows, seq], 0 where there is none; in
        evaluation mode, without gradients. Collective; equal on all ranks that read the same samples.

        Args:
            micro_batches: this rank's.
            measure: computes another value of each token from the output of the model.
        """

    @abstractmethod
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, seq, vocab] of ``input_ids`` [batch, seq], of the whole vocabulary; without
        gradients, in evaluation mode. Collective; equal on all ranks that read the same samples."""

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters under their global names; a tied parameter once, under its owner."""

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor | LocalShard]:
        """Return parameters and saved buffers under their global names (DTensor or piece where sharded); a tied
        parameter once."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, torch.Tensor | LocalShard], *, strict: bool = True) -> None:
        """Copy ``state`` in; ``strict`` refuses missing and extra names."""

    @abstractmethod
    def parameter_norm(self) -> torch.Tensor:
        """Return the 2-norm of the whole model's weights (masters where there are some), each element counted once; a
        device scalar, equal on all ranks. Collective."""

    @abstractmethod
    def local_modules(self) -> Sequence[torch.nn.Module]:
        """Return the plain modules of this rank: one a pipeline stage."""

    def decoding(self, lengths: Sequence[int], columns: int) -> Decoding:
        """Return what continues prompts of these lengths with a cache of keys and values.

        Args:
            lengths: tokens of each prompt.
            columns: tokens that the longest row can grow to.

        Raises:
            CacheUnsupported: it keeps no keys and values, so that generation computes all tokens again for each new
                one; the default.
        """
        raise CacheUnsupported("its engine has no cache")

    def writing(self) -> AbstractContextManager[object]:
        """Return a context around the passes that continue some prompts, within which weights do not change. The model
        may keep what it has gathered. Default: nothing."""
        return nullcontext()


class ParallelOptimizer(ABC):
    """An optimizer over a :class:`ParallelModel`."""

    inner: torch.optim.Optimizer
    """The stock optimizer, for schedulers and loggers."""
    skipped_steps: torch.Tensor | int = 0
    """Steps of this process that :meth:`reject_unless_finite` kept from the weights; mostly a device scalar."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Clip by the true global 2-norm and return it (before clipping), as a device scalar; None only measures.

        The gradients themselves may be scaled by :meth:`step` only.
        """

    @abstractmethod
    def reject_unless_finite(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Make the next :meth:`step` leave the weights unchanged, and count it, unless both scalars are finite. They
        are equal on all ranks, so that all ranks decide in the same way."""

    @abstractmethod
    def step(self) -> None:
        """Update the parameters (and masters), then clear the gradients."""

    def begin_step(self, step: int) -> None:
        """Set the number of the next :meth:`step` in the run, which determines the random numbers that it draws.
        Default: nothing, as of an optimizer that draws none."""

    @abstractmethod
    def set_lr_factor(self, factor: float) -> None:
        """Set each group's learning rate to its initial one times ``factor``."""

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor | LocalShard]:
        """Optimizer state flat: ``<parameter name>/<state name>`` → tensor."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, torch.Tensor | LocalShard]) -> None:
        """Load what :meth:`state_dict` returned, also in another layout."""
