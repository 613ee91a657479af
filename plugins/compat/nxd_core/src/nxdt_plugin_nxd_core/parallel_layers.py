"""``parallel_cross_entropy`` and ``clip_grad_norm``, which work on the run of this process group."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nxdt_core.engine.loss import vocabulary_parallel_cross_entropies
from nxdt_plugin_nxd_core import parallel_state
from nxdt_plugin_nxd_core.arguments import binds, expect, refused
from nxdt_plugin_nxd_core.config import current_config
from nxdt_plugin_nxd_core.errors import NotOfThisModel
from nxdt_plugin_nxd_core.layers import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from nxdt_plugin_nxd_core.rank_files import load, save

__all__ = [
    "ColumnParallelLinear",
    "GQAQKVColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "clip_grad_norm",
    "load",
    "parallel_cross_entropy",
    "parallel_state",
    "save",
]


@binds()
def parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return the cross-entropy of each target, 0 where it is −100.

    Args:
        vocab_parallel_logits: [..., vocab / tp], what a ``ColumnParallelLinear`` with ``gather_output=False`` gives.
        target: int64 [...].
        label_smoothing: 0, the only value here.

    Raises:
        ArgumentMeansNothing: labels would be smoothed.
    """
    call = "parallel_cross_entropy"
    for name, value in (("vocab_parallel_logits", vocab_parallel_logits), ("target", target)):
        expect(call, name, value, "a tensor", when=isinstance(value, torch.Tensor))
    found, wanted = tuple(target.shape), tuple(vocab_parallel_logits.shape[:-1])
    expect(
        call, "target", found, f"of the shape {wanted} of the logits without their last dimension", when=found == wanted
    )
    if label_smoothing:
        advice = "Leave it out, or compute the loss from logits of the whole vocabulary (gather_output=True)."
        raise refused(call, "label_smoothing", str(label_smoothing), "is not computed", advice)
    config = current_config()
    if config is not None and config.model is not None:
        vocab_parallel_logits = config.groups.of_columns(vocab_parallel_logits)
    return vocabulary_parallel_cross_entropies(vocab_parallel_logits, target)


@binds()
def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
) -> torch.Tensor:
    """Finish the gradients' sums over the ranks, clip their global norm to ``max_norm``, and return the norm before.

    Collective. The optimizer's next step neither repeats the sums nor clips again.

    Args:
        parameters: those of the model.
        max_norm: largest norm of the gradients of the whole model.
        norm_type: 2, the only norm here.

    Raises:
        ArgumentMeansNothing: another norm.
        NotOfThisModel: some parameters only, or others.
    """
    call = "clip_grad_norm"
    several = isinstance(parameters, Iterable)
    expect(call, "parameters", parameters, "model.parameters()", when=several)
    number = isinstance(max_norm, int | float | torch.Tensor) and float(max_norm) > 0
    expect(call, "max_norm", max_norm, "a number above 0", when=number)
    known = isinstance(norm_type, int | float) or norm_type == "inf"
    expect(call, "norm_type", norm_type, "2, the only norm here", when=known)
    if float(norm_type) != 2.0:
        advice = "Leave it out: the 2-norm over all gradients is clipped."
        raise refused(call, "norm_type", str(norm_type), "is not computed over ranks", advice)
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    config = current_config()
    optimizers = () if config is None else config.optimizers
    owner_of = {id(parameter): each for each in optimizers for parameter in each.trained}
    owner, *others = {owner_of.get(id(parameter)) for parameter in given} or [None]
    if owner is None or others:
        raise NotOfThisModel(call=call, problem="these are not the parameters of one optimizer")
    if {id(parameter) for parameter in given} < {id(parameter) for parameter in owner.trained}:
        raise NotOfThisModel(call=call, problem="these are only some of the parameters")
    norm: torch.Tensor = owner.finish(max_norm)
    return norm
