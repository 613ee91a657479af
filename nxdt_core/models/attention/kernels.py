"""Kernels of attention over part of the keys, which also return the log-sum-exp of their scores.

Attention over parts is exact once the parts are merged by log-sum-exp, and backward over a part is exact when it is
given the output and the log-sum-exp over all keys (Dao et al. 2022, arXiv:2205.14135).
``F.scaled_dot_product_attention`` hides both, so this file calls torch's kernels below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch.nn import functional

from nxdt_core.models.autocast import without_autocast

__all__ = ()  # of the core alone

_HALF_TYPES = (torch.bfloat16, torch.float16)
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Gradients of query, key and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Scores of a block: ``scale`` x query · key, and −∞ where a row does not see a key."""

    scale: float
    softcap: float | None = None
    """Scores are ``softcap · tanh(score / softcap)``, which the composed kernel alone computes; None: as they are."""
    causal: bool = False
    """Row ``i`` sees keys 0 … ``i``; not together with ``visible``."""
    visible: torch.Tensor | None = None
    """Keys that each row sees, bool [batch or 1, 1, rows, keys]; None where all are seen."""

    def additive_mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return ``visible`` as 0 and −∞ to be added to the scores."""
        if self.visible is None:
            return None
        zeros = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
        return zeros.masked_fill_(~self.visible, -torch.inf)


class AttentionKernel(Protocol):
    """A kernel of attention over one block of keys."""

    fused: bool
    """The kernel never holds the block's scores, so that an unmasked block of any size is one call."""

    def takes(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether it computes in this dtype and in heads of these widths."""
        ...

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, in the dtype of ``query``, and log-sum-exp. Those of a row that sees no key mean nothing."""
        ...

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
        """Return what this block adds to the gradients. ``output`` and ``lse`` are those over all keys of the rows, and
        with them a row that sees no key of this block adds nothing."""
        ...


def contiguous_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with the elements of a head adjacent in memory: kernels assume it, and the host's does not
    check."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return where parts of ``dtype`` are added up: float32 for halves, else the dtype itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


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
            scores, slope = _scores(query, key, scoring), None
            if scoring.softcap is not None:  # of tanh, by its result; none where a key is not seen
                slope = _grouped(1 - (scores / scoring.softcap).clamp_(min=-1).square_(), key)
            weights = _grouped(scores.sub_(lse.unsqueeze(-1)).exp_(), key)
            grad, output, wide_query, key, value = (t.to(weights.dtype) for t in (grad, output, query, key, value))
            delta = _grouped((grad * output).sum(-1, keepdim=True), key)
            grad = _grouped(grad, key)
            grad_value = weights.transpose(-1, -2) @ grad
            grad_scores = (grad @ value.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(scoring.scale)
            if slope is not None:
                grad_scores.mul_(slope)
            grad_query = (grad_scores @ key).reshape(query.shape)
            grad_key = grad_scores.transpose(-1, -2) @ _grouped(wide_query, key)
        return grad_query, grad_key, grad_value


def _scores(query: torch.Tensor, key: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """[batch, heads, rows, keys]"""
    assert not scoring.causal, "blocks are cut into rows for this kernel, and the cuts carry a mask"
    dtype = accumulation_dtype(query.dtype)
    scores = (_grouped(query.to(dtype), key) @ key.to(dtype).transpose(-1, -2)).mul_(scoring.scale)
    scores = scores.reshape(*query.shape[:-1], -1)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    return scores if scoring.visible is None else scores.masked_fill_(~scoring.visible, -torch.inf)


def _grouped(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[batch, heads, rows, …] to [batch, kv_heads, heads / kv_heads x rows, …]."""
    return tensor.reshape(tensor.shape[0], key.shape[1], -1, tensor.shape[-1])


class MaskedFlashKernel:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``: any float dtype, grouped heads, an additive mask."""

    fused = True

    def takes(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether values are as wide as queries, in any dtype."""
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
        """Return whether heads are up to 256 wide, in float32 or a half type."""
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
    """Return ``output`` [batch, heads, rows, width] with the heads of a row adjacent in memory: the kernel assumes that
    rows are heads x width elements apart."""
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
