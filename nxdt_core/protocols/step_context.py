"""``StepContext``, the argument of a forward pass and its loss in addition to the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["ALL_LAYERS", "SequenceShards", "StepContext", "VocabularyLoss"]


VocabularyLoss = Callable[["torch.Tensor", "torch.Tensor | None"], "torch.Tensor"]
"""From the logits of an engine and labels to what :func:`nxdt_core.models.loss.cross_entropies` returns; without
labels to what :func:`nxdt_core.models.loss.log_partition` does."""


ALL_LAYERS = -1
"""Key of :attr:`StepContext.pooled_shares`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShards:
    """Distribution of the tokens of each sequence over ranks; by default one rank has them all.

    A loss ``f(Σ over tokens)`` is computed on every rank from :attr:`total`, and each reports ``f × share``: the step
    adds the ranks up.
    """

    ranks: int = 1
    """Number of ranks that share each sequence."""
    total: Callable[[torch.Tensor], torch.Tensor] = lambda partial: partial
    """Returns the sum of all ranks' tensors, equal on all of them; differentiable. Collective."""

    @property
    def share(self) -> float:
        """The part that each rank reports of a figure that all ranks have."""
        return 1 / self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """Made by an engine for each micro-batch, and passed to the model, its layers, and the objective.

    Compiled layers get it as an input. What changes from step to step is therefore a tensor: ``torch.compile`` would
    compile a layer again for each value of a Python number.
    """

    numbers: torch.Tensor | None = None
    """int64 [3] on the host: the run's seed, the number of the step, and the first row of the micro-batch in the global
    batch. Dropout masks follow from it; None: from the generator of random numbers."""
    ids: torch.Tensor | None = None
    """[rows, tokens]: the micro-batch's token ids in this process; dropout masks need their shape."""
    padding: torch.Tensor | None = None
    """bool [rows, tokens]: positions that hold no token. Routers of experts give them no place and count them nowhere.
    None: all hold one."""
    expert_rows: torch.Tensor | None = None
    """int64, within experts that have dropout: the number of each of their rows."""
    labels: torch.Tensor | None = None
    """int64 [rows, tokens] in a pass for a loss: a head may return the losses of these labels instead of logits. None:
    logits are wanted."""
    head_loss: Callable[[Any, StepContext], torch.Tensor] | None = None
    """The objective's own terms [rows · tokens, terms], which it takes in place of logits, from a head that computes
    losses of some tokens at a time (:class:`nxdt_core.engine.loss.ChunkedHead`). None: cross-entropies of the labels.
    """
    masks: Mapping[str, Any] = field(default_factory=dict)
    """Attention masks of packed documents, made before a compiled layer runs; by the names of
    :class:`nxdt_core.models.attention.documents.DocumentMasks`."""
    pooled_shares: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)
    """[experts] by number of the router, for each that has seen the micro-batch: its experts' shares of the
    assignments, where a loss pools them over layers; under :data:`ALL_LAYERS` the sum over all stages of a pipeline."""
    aux_loss_scale: float | torch.Tensor = 1.0
    """Factor of auxiliary losses, which are sums over the micro-batch's tokens: 1 over the tokens of the global batch
    without padding, a scalar on the device."""
    vocabulary_loss: VocabularyLoss | None = None
    """Computes cross-entropies; None: for logits of the whole vocabulary, in stock operations."""
    sequences: SequenceShards = SequenceShards()
    """The distribution of the micro-batch's sequences over ranks."""
