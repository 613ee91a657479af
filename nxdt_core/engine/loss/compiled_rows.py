"""The passes over rows of logits as one kernel each, without copies in full precision."""

from __future__ import annotations

import functools

import torch

from nxdt_core.engine.compile.one_graph import one_graph
from nxdt_core.models.loss.logit_rows import RowKernels

__all__ = ["compiled_rows"]


@functools.cache
def compiled_rows(backend: str, *, static_shapes: bool = False) -> RowKernels:
    """Compile the passes when they first run; arguments as of
    :func:`nxdt_core.engine.compile.layers.compile_layers`."""
    dynamic = False if static_shapes else None
    compiled = functools.partial(one_graph, dynamic=dynamic, backend=backend)
    sums, gradients = compiled(_sums), compiled(_gradients)

    def of_plain(rows: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        # Logits require gradients in training and not in validation: that would be two graphs.
        both: tuple[torch.Tensor, torch.Tensor] = sums(rows.detach(), columns, dtype)
        return both

    return RowKernels(of_plain, gradients)


def _sums(rows: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Written as inductor's pass for an online softmax looks for it: a Triton kernel then reads rows once.

    ``torch.logsumexp`` replaces infinite maxima between the two reductions, so that the pass does not find it.
    """
    values = rows.to(dtype)
    largest = values.amax(1, keepdim=True)
    total = (values - largest).exp().sum(1, keepdim=True)
    return (total.log() + largest).squeeze(1), values.gather(1, columns[:, None]).squeeze(1)


def _gradients(
    rows: torch.Tensor,
    columns: torch.Tensor,
    log_sums: torch.Tensor,
    hits: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    probabilities = (rows - log_sums[:, None]).exp()  # in the dtype of log_sums
    hit = torch.arange(rows.shape[1], device=rows.device) == columns[:, None]
    out.copy_((probabilities + torch.where(hit, hits[:, None], 0)) * scale[:, None])
    return out
