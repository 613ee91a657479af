"""Logits of which each tensor parallel rank holds a part, and their cross-entropy."""

from __future__ import annotations

from typing import Any, NoReturn, final

import torch

from nxdt_core.models.loss import row_weights, whole_vocabulary_cross_entropies
from nxdt_plugin_nxd.errors import VocabularyIsSharded

__all__ = ["ShardedLogits", "sharded_cross_entropies", "whole_logits"]


@final
class ShardedLogits:
    """Not a tensor, so that an objective that takes it for whole logits fails instead of computing something else."""

    __slots__ = ("local",)

    def __init__(self, local: torch.Tensor) -> None:
        """``local`` [batch, seq, vocab / tp]."""
        self.local = local

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise VocabularyIsSharded(attribute=name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        del types, args, kwargs
        raise VocabularyIsSharded(attribute=getattr(function, "__name__", str(function)))


def sharded_cross_entropies(logits: torch.Tensor | ShardedLogits, labels: torch.Tensor | None) -> torch.Tensor:
    """Compute :func:`nxdt_core.models.loss.cross_entropies` by the library's loss; equal on all ranks.

    In float32: the library computes in the dtype of the logits, and in their memory.

    Raises:
        VocabularyIsSharded: without labels, since the library has no log-sum-exp over ranks.
    """
    if not isinstance(logits, ShardedLogits):
        return whole_vocabulary_cross_entropies(logits, labels)
    if labels is None:
        raise VocabularyIsSharded(attribute="log_partition")
    from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy

    _, targets = row_weights(logits.local, labels, None)
    copy = logits.local.to(torch.promote_types(logits.local.dtype, torch.float32), copy=True)
    losses: torch.Tensor = parallel_cross_entropy(copy, targets.view(labels.shape))
    return losses


def whole_logits(logits: torch.Tensor | ShardedLogits) -> torch.Tensor:
    """Return the logits of the whole vocabulary; a collective where they are sharded."""
    if not isinstance(logits, ShardedLogits):
        return logits
    from neuronx_distributed.parallel_layers.mappings import gather_from_tensor_model_parallel_region

    whole: torch.Tensor = gather_from_tensor_model_parallel_region(logits.local)
    return whole
