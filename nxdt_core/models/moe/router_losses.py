"""Auxiliary losses of a router, each summed over the tokens that this process has.

Sums, since all auxiliary losses are (:mod:`nxdt_core.models.moe.aux_loss`): the step divides them by the weight of the
global batch, as it divides the main loss. What a coefficient multiplies is therefore

    (sum over the micro-batches m of the global batch of  tokens_m · L_m)  /  weight of the global batch

with ``L_m`` the published, dimensionless loss of one layer over one micro-batch. Where every token bears loss with
weight 1 that is the mean of ``L_m`` over the tokens; where few do, it grows as each loss token's share of the main loss
does. Layers add up. A micro-batch has its statistics to itself, whichever data parallel rank computes it, so the same
micro-batches give the same losses in every layout; context parallel ranks hold parts of one micro-batch and share them.
"""

from __future__ import annotations

import torch

__all__ = ["balance_loss_sum", "z_loss_sum"]


def balance_loss_sum(
    probabilities: torch.Tensor, assigned: torch.Tensor, *, top_k: int, micro_batch_tokens: int
) -> torch.Tensor:
    """``tokens · L`` with ``L = experts · Σ_e f_e P_e`` (Fedus et al. 2021, arXiv:2101.03961, equation 4; GShard,
    arXiv:2006.16668), as far as the tokens of this process contribute to it.

    ``f_e`` is the share of the micro-batch's assignments that chose expert e, before any are dropped (the shares add
    up to 1 for any ``top_k``; Hugging Face's add up to ``top_k``); ``P_e`` is the mean probability. Perfect balance is
    ``L = 1``. ``f`` is a count without a gradient, so ``L`` is linear in the tokens' probabilities: the parts of all
    processes add up to the whole, and so do their gradients.

    Args:
        probabilities: [..., experts] of this process's tokens, over all experts.
        assigned: int [experts], assignments of the whole micro-batch.
        top_k: assignments a token.
        micro_batch_tokens: tokens of the whole micro-batch.
    """
    experts = probabilities.shape[-1]
    shares = assigned.to(probabilities.dtype) / (top_k * micro_batch_tokens)
    return experts * (probabilities.flatten(0, -2).sum(0) * shares).sum()


def z_loss_sum(logits: torch.Tensor) -> torch.Tensor:
    """``Σ_tokens logsumexp(logits)²`` (Zoph et al. 2022, arXiv:2202.08906, equation 5); ``logits`` [..., experts]."""
    return logits.logsumexp(-1).square().sum()
