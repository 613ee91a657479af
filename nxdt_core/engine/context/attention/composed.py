"""Attention made of matrix products: runs on any device and in any dtype, and is what the other kernels must equal."""

from __future__ import annotations

import torch

from nxdt_core.engine.context.attention.kernel import Gradients, Scoring, accumulation_dtype
from nxdt_core.models.autocast import without_autocast

__all__ = ["ComposedKernel"]


class ComposedKernel:
    """Scores, softmax and products in float32 at least. Holds a block's scores: give it few rows at a time.

    Rows of the heads that share a key head are multiplied with it as one matrix, so that no key is repeated and the
    sum over the group in the gradient of a key comes with the product.
    """

    fused = False

    def takes(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        """Return True: the kernel takes every dtype, shape and device."""
        return True

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what :meth:`AttentionKernel.forward` defines; not causal."""
        with without_autocast(query):
            scores = _scores(query, key, scoring)
            lse = scores.logsumexp(-1)
            finite = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
            output = _grouped(scores.sub_(finite).exp_(), key) @ value.to(scores.dtype)
        return output.reshape(*query.shape[:-1], -1).to(query.dtype), lse

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        scoring: Scoring,
    ) -> Gradients:
        """Return what :meth:`AttentionKernel.backward` defines; not causal."""
        with without_autocast(query):
            scores = _scores(query, key, scoring)
            weights = _grouped(scores.sub_(lse.unsqueeze(-1)).exp_(), key)
            grad, output, wide_query, key, value = (t.to(weights.dtype) for t in (grad, output, query, key, value))
            delta = _grouped((grad * output).sum(-1, keepdim=True), key)
            grad = _grouped(grad, key)
            grad_value = weights.transpose(-1, -2) @ grad
            grad_scores = (grad @ value.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(scoring.scale)
            grad_query = (grad_scores @ key).reshape(query.shape)
            grad_key = grad_scores.transpose(-1, -2) @ _grouped(wide_query, key)
        return grad_query, grad_key, grad_value


def _scores(query: torch.Tensor, key: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """[batch, heads, rows, keys]"""
    assert not scoring.causal, "blocks are cut into rows for this kernel, and the cuts carry a mask"
    dtype = accumulation_dtype(query.dtype)
    scores = (_grouped(query.to(dtype), key) @ key.to(dtype).transpose(-1, -2)).mul_(scoring.scale)
    scores = scores.reshape(*query.shape[:-1], -1)
    return scores if scoring.visible is None else scores.masked_fill_(~scoring.visible, -torch.inf)


def _grouped(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[batch, heads, rows, …] to [batch, kv_heads, heads / kv_heads x rows, …]."""
    return tensor.reshape(tensor.shape[0], key.shape[1], -1, tensor.shape[-1])
