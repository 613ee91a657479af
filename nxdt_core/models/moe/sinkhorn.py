"""Routing as an assignment problem: one expert per token, and about equally many tokens per expert."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from nxdt_core.models.moe.router import TopKRouter

RouterActivation = Literal["sigmoid", "softmax"]
"""Function that turns a logit into the weight of its expert's output; softmax is over all experts."""


class SinkhornRouter(TopKRouter):
    """Sends each token to the expert that the balanced assignment gives it (Clark et al. 2022, arXiv:2202.01169,
    S-BASE), weighted by the activation of its logit.

    The assignment has no gradient and needs the whole micro-batch at hand. In evaluation mode, where tokens may come
    one by one, a token goes to its best expert.
    """

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        *,
        activation: RouterActivation = "sigmoid",
        iterations: int = 30,
        tolerance: float | None = None,
        **options: Any,
    ) -> None:
        """Create the router's weight [experts, hidden].

        Args:
            hidden_size: width of the tokens.
            experts: number of experts.
            activation: see :data:`RouterActivation`.
            iterations: of :func:`sinkhorn_offsets`.
            tolerance: of :func:`sinkhorn_offsets`.
            options: ``capacity_factor`` and coefficients, as of :class:`TopKRouter`.
        """
        super().__init__(hidden_size, experts, top_k=1, **options)
        self.activation, self.iterations, self.tolerance = activation, iterations, tolerance

    def _choose(
        self, logits: torch.Tensor, probabilities: torch.Tensor, padding: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        balanced = logits.detach()
        if self.training:
            if self.shards.shards > 1:
                raise ValueError("a balanced assignment needs the whole micro-batch, not a part of its tokens")
            rows, left_out = balanced.flatten(0, -2), None if padding is None else padding.flatten()
            balanced = balanced + sinkhorn_offsets(
                rows, iterations=self.iterations, tolerance=self.tolerance, padding=left_out
            )
        experts = balanced.argmax(-1, keepdim=True)
        weights = logits.sigmoid() if self.activation == "sigmoid" else probabilities
        return experts, weights.gather(-1, experts)


@torch.no_grad()
def sinkhorn_offsets(
    logits: torch.Tensor, *, iterations: int, tolerance: float | None = None, padding: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what to add to each expert's logits so that ``exp`` of them, each token's scaled to one sum, has equal
    sums over the tokens for all experts (Sinkhorn 1964; in logarithms, so that nothing overflows).

    Args:
        logits: [tokens, experts].
        iterations: at the most.
        tolerance: offsets that move by less on the average stay; None goes on to the end. The host never waits.
        padding: bool [tokens], which rows are none.

    Returns:
        [experts]
    """
    if padding is None:
        padding = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    share = (~padding).sum().to(logits.dtype).div(logits.shape[1]).log()
    padding = padding.unsqueeze(1)
    offsets = logits.new_zeros(logits.shape[1])
    settled = torch.zeros((), dtype=torch.bool, device=logits.device)
    for _ in range(iterations):
        scaled = logits - (logits + offsets).logsumexp(1, keepdim=True)
        moved = share - scaled.masked_fill(padding, -math.inf).logsumexp(0)
        if tolerance is not None:
            small = (moved - offsets).abs().mean() <= tolerance
            moved = torch.where(settled, offsets, moved)
            settled = settled | small
        offsets = moved
    return offsets
