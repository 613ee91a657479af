"""``parallel_cross_entropy`` and ``clip_grad_norm``, which work on the run of this process group."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nxdt_core.engine.loss import vocabulary_parallel_cross_entropies
from nxdt_plugin_nxd_core import parallel_state
from nxdt_plugin_nxd_core.arguments import binds, expect
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


@binds
def parallel_cross_entropy(vocab_parallel_logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each target, 0 where it is −100.

    Args:
        vocab_parallel_logits: [..., vocab / tp], what a ``ColumnParallelLinear`` with ``gather_output=False`` gives.
        target: int64 [...].
    """
    found, wanted = tuple(target.shape), tuple(vocab_parallel_logits.shape[:-1])
    what = f"of the shape {wanted} of the logits without their last dimension"
    expect("parallel_cross_entropy", "target", found, what, when=found == wanted)
    config = current_config()
    mesh = None if config is None or config.model is None else config.mesh
    if mesh is not None and mesh["tp"].size() > 1:
        from torch.distributed.tensor import DTensor, Shard  # half a CPU-second that one process does not need

        columns = [Shard(vocab_parallel_logits.ndim - 1)]
        vocab_parallel_logits = DTensor.from_local(vocab_parallel_logits, mesh["tp"], columns, run_check=False)
    return vocabulary_parallel_cross_entropies(vocab_parallel_logits, target)


@binds
def clip_grad_norm(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Finish the gradients' sums over the ranks, clip their global norm to ``max_norm``, and return the norm before.

    Collective. The optimizer's next step neither repeats the sums nor clips again.

    Raises:
        NotOfThisModel: some parameters only, or others.
    """
    given = {id(each) for each in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
    config = current_config()
    for optimizer in () if config is None else config.optimizers:
        trained = {id(parameter) for parameter in optimizer.trained}
        if given and given <= trained:
            if given != trained:
                raise NotOfThisModel(call="clip_grad_norm", problem="these are only some of the parameters")
            norm: torch.Tensor = optimizer.finish(max_norm)
            return norm
    raise NotOfThisModel(call="clip_grad_norm", problem="these are not the parameters of one optimizer")
