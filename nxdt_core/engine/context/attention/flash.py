"""Torch's fused kernels, below ``F.scaled_dot_product_attention``: signatures and restrictions of torch 2.13."""

from __future__ import annotations

from typing import cast

import torch
from torch.nn import functional

from nxdt_core.engine.context.attention.kernel import Gradients, Scoring

__all__ = ["FlashOrEfficientKernel", "MaskedFlashKernel"]

_HALF_TYPES = (torch.bfloat16, torch.float16)


class MaskedFlashKernel:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``: any float dtype, grouped heads, an additive mask."""

    fused = True

    def takes(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        """Any dtype, and values as wide as queries."""
        return query.shape[-1] == value.shape[-1]

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what :meth:`AttentionKernel.forward` defines."""
        attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, scoring.causal, attn_mask=scoring.additive_mask(query.dtype), scale=scoring.scale
        )
        return cast(tuple[torch.Tensor, torch.Tensor], attended)

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
        """Return what :meth:`AttentionKernel.backward` defines."""
        mask, scale = scoring.additive_mask(query.dtype), scoring.scale
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, lse, 0.0, scoring.causal, attn_mask=mask, scale=scale
        )
        return cast(Gradients, gradients)


class FlashOrEfficientKernel:
    """Flash attention in half precision without a mask, else memory-efficient attention.

    The latter knows no grouped heads, wants the rows of a bias 16 elements apart, and keeps log-sum-exps for a
    multiple of 32 rows. Its backward in half precision reads the output as its forward lays it out, and not by its
    strides. Both want heads a multiple of 8 wide, which ``F.scaled_dot_product_attention`` pads to.
    """

    fused = True

    def takes(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        """float32 and halves in heads up to 256 wide."""
        width = query.shape[-1]
        return (
            query.dtype in (torch.float32, *_HALF_TYPES)
            and width == value.shape[-1]
            and width % 8 == 0
            and width <= 256
        )

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what :meth:`AttentionKernel.forward` defines."""
        if _flash(query, scoring):
            output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, scoring.causal, scale=scoring.scale
            )
            return output, lse
        key, value = _repeated(key, query), _repeated(value, query)
        bias = _bias(scoring, query)
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, scoring.causal, scale=scoring.scale
        )
        return output, lse[..., : query.shape[2]]

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
        """Return what :meth:`AttentionKernel.backward` defines."""
        # State of the generator for dropout, of which there is none.
        seed = offset = torch.zeros((), dtype=torch.int64, device=query.device)
        if _flash(query, scoring):
            flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
            lengths = (None, None, query.shape[2], key.shape[2])
            gradients = flash(
                *(grad, query, key, value, output, lse.contiguous(), *lengths),
                *(0.0, scoring.causal, seed, offset),
                scale=scoring.scale,
            )
            return cast(Gradients, gradients)
        padded = functional.pad(lse, (0, -lse.shape[-1] % 32))
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        grad_query, grad_key, grad_value, _ = efficient(
            *(grad, query, _repeated(key, query), _repeated(value, query), _bias(scoring, query)),
            *(_adjacent_heads(output), padded),
            *(seed, offset, 0.0, [True, True, True, False], scoring.causal),
            scale=scoring.scale,
        )
        return grad_query, _summed(grad_key, key), _summed(grad_value, value)


def _flash(query: torch.Tensor, scoring: Scoring) -> bool:
    return scoring.visible is None and query.dtype in _HALF_TYPES


def _adjacent_heads(output: torch.Tensor) -> torch.Tensor:
    """``output`` [batch, heads, rows, width] with the heads of a row side by side: the only distance between rows that
    the kernel knows is heads x width elements."""
    rows = output.transpose(1, 2)
    return output if rows[0].is_contiguous() else rows.contiguous().transpose(1, 2)


def _repeated(shared: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], dim=1)


def _summed(grad: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """The gradient of :func:`_repeated`."""
    batch, kv_heads, keys, width = shared.shape
    return grad.reshape(batch, kv_heads, -1, keys, width).sum(2)


def _bias(scoring: Scoring, query: torch.Tensor) -> torch.Tensor | None:
    """The mask for every head, in storage whose rows are 16 elements apart."""
    mask = scoring.additive_mask(query.dtype)
    if mask is None:
        return None
    keys = mask.shape[-1]
    return functional.pad(mask, (0, -keys % 16))[..., :keys].expand(*query.shape[:2], -1, -1)
