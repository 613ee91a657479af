"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.distributed.devices import profile_of


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension; statistics in float32 at the least.

    Accelerators have a fused kernel for it. On the CPU torch composes it of eight operations that each read and write
    the whole activation, so full-precision tensors take :class:`_FewPasses` there: forward and backward cost
    0.44 of the composition's time at size 64 and 0.35 from 256 on (``benchmarks/models/forward_backward.py --parts``).
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``hidden`` [..., size], divided by its root mean square and scaled, in its own dtype."""
        normalised: torch.Tensor
        # Subclasses of Tensor (sharded ones) and graph capture take the stock operator, which they know.
        if (
            not torch.compiler.is_compiling()
            and type(hidden) is torch.Tensor
            and profile_of(hidden.device).cache_bound_kernels
            and hidden.dtype == self.weight.dtype
            and hidden.dtype in (torch.float32, torch.float64)
        ):
            if torch.is_grad_enabled():
                normalised = _FewPasses.apply(hidden, self.weight, self.eps)  # type: ignore[no-untyped-call]
            else:  # a node of autograd costs as much as the norm of one token
                normalised = (hidden * _scale_of(hidden, self.eps)).mul_(self.weight)
        else:
            normalised = functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return normalised

    def extra_repr(self) -> str:
        """Return the size and epsilon, for ``print(model)``."""
        return f"{self.weight.numel()}, eps={self.eps}"


def _scale_of(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``1 / sqrt(mean(hidden²) + eps)``, [..., 1]."""
    norm: torch.Tensor = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    return norm.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()


class _FewPasses(torch.autograd.Function):
    """RMSNorm with the two reductions of its backward as matrix-vector products."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = _scale_of(hidden, eps)
        ctx.save_for_backward(hidden, weight, scale)
        return (hidden * scale).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, scale = ctx.saved_tensors
        size = hidden.shape[-1]
        rows, grad_rows, scales = hidden.reshape(-1, size), grad.reshape(-1, size), scale.reshape(-1, 1)
        product = grad_rows * rows
        grad_weight = torch.mv(product.t(), scales.squeeze(1))
        along = torch.mv(product, weight).unsqueeze(1).mul_(scales.pow(3)).div_(size)  # [rows, 1]
        grad_hidden = torch.mul(grad_rows, weight).mul_(scales).addcmul_(rows, along, value=-1)
        return grad_hidden.view_as(hidden), grad_weight, None
