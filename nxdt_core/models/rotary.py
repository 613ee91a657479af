"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves of a head rotated against each other.

The two scalings of its frequencies that Llama checkpoints use are here; the sine and cosine are computed once for a
forward pass and applied in each layer by :func:`rotate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nxdt_core.distributed.devices import HOST
from nxdt_core.models.rope_scaling import RopeScalingConfig

__all__ = [
    "LinearScaling",
    "Llama3Scaling",
    "RotaryEmbedding",
    "RotaryScaling",
    "frequencies",
    "rotary_scaling",
    "rotate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595): all frequencies divided by ``factor``."""

    factor: float

    def __call__(self, frequency: torch.Tensor) -> torch.Tensor:
        """Scale ``frequency`` [head_dim / 2]."""
        return frequency / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by ``factor``, short ones kept, those between interpolated (report of
    Llama 3, arXiv:2407.21783, and the released model's code)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __call__(self, frequency: torch.Tensor) -> torch.Tensor:
        """Scale ``frequency`` [head_dim / 2]."""
        wavelength = 2 * math.pi / frequency
        turns = self.original_max_position_embeddings / wavelength  # within the original context
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0, 1)
        return (1 - keep) * frequency / self.factor + keep * frequency


RotaryScaling = LinearScaling | Llama3Scaling


def rotary_scaling(config: RopeScalingConfig | None) -> RotaryScaling | None:
    """Return the scaling that a checked section ``rope_scaling`` describes."""
    if config is None or config.kind == "default":
        return None
    assert config.factor is not None
    if config.kind == "linear":
        return LinearScaling(factor=config.factor)
    assert config.low_freq_factor is not None
    assert config.high_freq_factor is not None
    assert config.original_max_position_embeddings is not None
    return Llama3Scaling(
        factor=config.factor,
        low_freq_factor=config.low_freq_factor,
        high_freq_factor=config.high_freq_factor,
        original_max_position_embeddings=config.original_max_position_embeddings,
    )


def frequencies(head_dim: int, theta: float, scaling: RotaryScaling | None = None) -> torch.Tensor:
    """Angles by which one position turns each pair: float32 [head_dim / 2], on the CPU.

    Always float32 and always computed on the CPU: checkpoints were trained with these very roundings, and at position
    8,000 an error in the last bit of a frequency is one of 5e-4 in the angle.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=HOST) / head_dim
    frequency = torch.pow(theta, exponent).reciprocal()
    return frequency if scaling is None else scaling(frequency)


class RotaryEmbedding(nn.Module):
    """Tables of cosines and sines for the positions of a batch."""

    frequency: torch.Tensor

    def __init__(self, head_dim: int, *, theta: float = 10_000.0, scaling: RotaryScaling | None = None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self.register_buffer("frequency", torch.empty(head_dim // 2), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Compute the frequencies again on the device of the buffer."""
        self.frequency = frequencies(self.head_dim, self.theta, self.scaling).to(self.frequency.device)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of ``positions`` [..., seq]: float32 [..., seq, 1, head_dim / 2], to broadcast over heads."""
        if self.frequency.dtype != torch.float32:  # the whole model was cast; bf16 frequencies are 0.4 % off
            self.reset_buffers()
        angle = positions[..., None, None].float() * self.frequency
        return angle.cos(), angle.sin()


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn ``heads`` [batch, seq, heads, head_dim] by the tables of :class:`RotaryEmbedding`.

    The first and the second half of ``head_dim`` are the two coordinates of a pair, as in Hugging Face checkpoints.
    Where the tables are of fewer channels, the others stay as they are (GPT-NeoX, arXiv:2204.06745, section 2.1).
    """
    channels = 2 * cos.shape[-1]
    if channels < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :channels], cos, sin), heads[..., channels:]), dim=-1)
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    if not torch.is_grad_enabled():  # a node of autograd costs more than the rotation of one token
        return _turn(heads, cos, sin)
    rotated: torch.Tensor = _Rotation.apply(heads, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    """Three passes over the data and nothing but the tables saved; backward is the rotation the other way."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, -sin), None, None


def _turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Written in two ways that give the same bits: in place, and for inductor, which makes two kernels of that."""
    if torch.compiler.is_compiling():
        first, second = heads.chunk(2, dim=-1)
        return torch.cat(
            (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)), -1
        )
    pairs = heads.view(*heads.shape[:-1], 2, -1)  # [batch, seq, heads, 2, head_dim / 2]
    turned = pairs * cos.unsqueeze(-2)
    turned[..., 0, :].addcmul_(pairs[..., 1, :], sin, value=-1)
    turned[..., 1, :].addcmul_(pairs[..., 0, :], sin)
    return turned.flatten(-2)
