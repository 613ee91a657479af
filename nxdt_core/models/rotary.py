"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves of a head rotated against each other.

The scalings of its frequencies are those of transformers. The sine and cosine are computed once for a forward pass and
applied in each layer by :func:`rotate`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from nxdt_core.distributed.devices import HOST
from nxdt_core.models.rope_scaling import RopeScalingConfig


def frequencies(
    head_dim: int,
    theta: float,
    scaling: RopeScalingConfig | None = None,
    *,
    max_positions: int = 1,
    long: bool = False,
) -> torch.Tensor:
    """Angles by which one position turns each pair: float32 [head_dim / 2], on the CPU.

    Always float32 and always computed on the CPU: checkpoints were trained with these very roundings, and at position
    8,000 an error in the last bit of a frequency is one of 5e-4 in the angle.

    Args:
        head_dim: channels that are rotated.
        theta: base of the frequencies.
        scaling: a checked section ``rope_scaling``.
        max_positions: longest sequence of the model, from which a scaling without ``factor`` takes it.
        long: ``longrope``: of documents beyond the original context. Those of ``dynamic`` depend on their length.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=HOST) / head_dim
    frequency = torch.pow(theta, exponent).reciprocal()
    if scaling is None or scaling.kind in ("default", "dynamic"):
        return frequency
    if scaling.kind == "longrope":
        factors = scaling.long_factor if long else scaling.short_factor
        return frequency / torch.tensor(factors, dtype=torch.float32, device=HOST)
    factor = scaling.stretch(max_positions)
    if scaling.kind == "linear":
        return frequency / factor
    # How much of each frequency is kept.
    original = scaling.original_max_position_embeddings
    assert original is not None
    if scaling.kind == "llama3":  # arXiv:2407.21783, and the released code
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        assert low is not None
        assert high is not None
        wavelength = 2 * math.pi / frequency
        keep = ((original / wavelength - low) / (high - low)).clamp(0, 1)  # turns within the original context
    else:  # YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2)
        pairs = len(frequency)
        # The pairs of channels that turn so often within the original context.
        bounds = ((scaling.beta_fast or 32), (scaling.beta_slow or 1))
        first, last = (pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta) for turns in bounds)
        if scaling.truncate is not False:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        width = 0.001 if first == last else last - first
        keep = 1 - ((torch.arange(pairs, dtype=torch.float32, device=HOST) - first) / width).clamp(0, 1)
    return (1 - keep) * frequency / factor + keep * frequency


def document_lengths(positions: torch.Tensor, document_ids: torch.Tensor | None) -> torch.Tensor:
    """Return the length of the document of each token: its last position and one more.

    Args:
        positions: int64 [batch, seq] or [seq].
        document_ids: int64 [batch, seq], equal in neighbouring tokens of one document; None: one document a row.

    Returns:
        int64 [batch, seq], or [..., 1] where a row is one document.
    """
    if document_ids is None:
        return positions.amax(-1, keepdim=True) + 1
    begins = document_ids[:, 1:] != document_ids[:, :-1]
    number = torch.nn.functional.pad(begins.cumsum(1), (1, 0))  # of the document within its row
    last = torch.zeros_like(number).scatter_reduce(1, number, positions.expand_as(number), "amax")
    return last.gather(1, number) + 1


class RotaryEmbedding(nn.Module):
    """Tables of cosines and sines for the positions of a batch.

    The frequencies of ``dynamic`` and ``longrope`` follow from the length of each document. transformers takes that of
    the longest one in the batch, so that both agree on documents of one length, and on one at a time.
    """

    frequency: torch.Tensor
    long_frequency: torch.Tensor | None

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float = 10_000.0,
        scaling: RopeScalingConfig | None = None,
        max_positions: int = 1,
    ) -> None:
        """The arguments are those of :func:`nxdt_core.models.rotary.frequencies`."""
        super().__init__()
        self.head_dim, self.theta, self.max_positions = head_dim, theta, max_positions
        self.scaling = scaling
        self.original = scaling.original_max_position_embeddings if scaling and scaling.depends_on_length else None
        """Longest document, in tokens, whose frequencies do not follow from its length; None: all of them."""
        self.attention = 1.0 if scaling is None else scaling.attention(max_positions)
        self.register_buffer("frequency", torch.empty(head_dim // 2), persistent=False)
        self.register_buffer("long_frequency", None, persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Compute the frequencies again on the device of the buffer."""
        device, arguments = self.frequency.device, (self.head_dim, self.theta, self.scaling)
        self.frequency = frequencies(*arguments, max_positions=self.max_positions).to(device)
        if self.scaling is not None and self.scaling.kind == "longrope":
            self.long_frequency = frequencies(*arguments, max_positions=self.max_positions, long=True).to(device)

    def forward(
        self, positions: torch.Tensor, document_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of ``positions`` [..., seq]: float32 [..., seq, 1, head_dim / 2], to broadcast over heads.

        ``document_ids`` as for :func:`nxdt_core.models.rotary.document_lengths`.
        """
        if self.frequency.dtype != torch.float32:  # the whole model was cast; bf16 frequencies are 0.4 % off
            self.reset_buffers()
        frequency = self.frequency
        if self.original is not None:
            assert self.scaling is not None
            lengths, longer = document_lengths(positions, document_ids)[..., None, None], self.long_frequency
            if longer is None:  # dynamic: the base grows with the length (arXiv:2309.00071, section 3.3)
                factor = self.scaling.stretch(self.max_positions)
                growth = (factor * lengths / self.original - (factor - 1)).clamp(min=1)
                exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=lengths.device) / self.head_dim
                base = self.theta * growth ** (self.head_dim / (self.head_dim - 2))
                longer = 1 / base**exponent
            frequency = torch.where(lengths > self.original, longer, self.frequency)
        angle = positions[..., None, None].float() * frequency
        if self.attention == 1:
            return angle.cos(), angle.sin()
        return angle.cos() * self.attention, angle.sin() * self.attention

    def keys_unchanged(self, shortest: int, longest: int) -> bool:
        """Return whether keys stay as they are while a text grows from ``shortest`` to ``longest`` tokens."""
        if self.original is None or longest <= self.original:
            return True
        assert self.scaling is not None
        return self.scaling.kind == "longrope" and shortest > self.original


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
    return _Rotation.apply(heads, cos, sin)  # type: ignore[no-untyped-call, no-any-return]


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
