"""Dropout masks by position: which elements of a token's features are kept depends only on the run's seed, the step,
the module, the row of the global batch and the position in the sequence. No layout changes it.

The mask of a row is drawn whole, [sequence, features], and each process takes its part. A process that holds only a
part of the row draws more than it needs, and drawing needs a byte per element. A function of each element, as for
initial weights, would cost more than the layer after the dropout.

For ``torch.compile``, drawing is one operator. It depends on tensors on the host, so that neither a step nor a layer
needs a separate graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.step_context import StepContext

__all__ = ["MaskPart", "decoded_name", "encoded_name", "step_numbers", "whole_sequence"]

_NAME_BYTES = 128
"""Names of modules fill up to a multiple of this, so that those of all layers are tensors of one shape."""


def whole_sequence(length: int) -> Sequence[int]:
    """:attr:`MaskPart.runs` of a process that holds whole sequences."""
    return 0, length


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPart:
    """A process's part of the mask of one row, for one module; filled by engines."""

    name: torch.Tensor
    """:func:`encoded_name` of the module in the whole model."""
    shards: int = 1
    """Processes that share each sequence in equal parts."""
    runs: Callable[[int], Sequence[int]] = whole_sequence
    """From the length of the whole sequence to the tokens that this process holds between tensor blocks' collectives:
    where each run of neighbours begins and where it ends, in one list."""
    sequence_parts: tuple[int, int] = (0, 1)
    """Which of how many further parts of these tokens it holds under sequence parallelism."""
    features: tuple[int, int] | None = None
    """Where its features begin, and how many the whole has; None where that is not said."""
    feature_parts: tuple[int, int] = (0, 1)
    """Otherwise: which of how many equal parts of the features it holds."""

    def mask(self, hidden: torch.Tensor, p: float, step: StepContext) -> torch.Tensor | None:
        """Return what is kept of ``hidden`` [rows, tokens, features], of its shape; None where no row is known."""
        numbers, ids = step.numbers, step.ids
        if numbers is None or ids is None or hidden.is_meta or hidden.dim() != 3:
            return None
        part, parts = self.sequence_parts
        rows, tokens = ids.shape
        if hidden.shape[0] != rows or hidden.shape[1] not in (tokens, tokens // parts):
            return None
        length = tokens * self.shards
        own_part, feature_parts = self.feature_parts
        width = hidden.shape[2]
        begin, features = self.features or (own_part * width, feature_parts * width)
        kept: torch.Tensor = _position_mask(
            numbers,
            self.name,
            list(hidden.shape),
            [length, features],
            list(self.runs(length)),
            0 if hidden.shape[1] == tokens else part * hidden.shape[1],
            begin,
            1 - p,
            hidden.device,
        )
        return kept


def step_numbers(seed: int, step: int, batch: Batch) -> torch.Tensor | None:
    """Return :attr:`StepContext.numbers` of a micro-batch; None where its place in the global batch is unknown."""
    return None if batch.first_row is None else torch.tensor((seed, step, batch.first_row), device=HOST)


def encoded_name(name: str) -> torch.Tensor:
    """Return the bytes of ``name`` and zeros behind them, on the host."""
    encoded = name.encode()
    return torch.tensor([*encoded, *bytes(-len(encoded) % _NAME_BYTES)], dtype=torch.uint8, device=HOST)


def decoded_name(name: torch.Tensor) -> str:
    """Return the name that :func:`encoded_name` encoded."""
    return bytes(name.tolist()).rstrip(b"\0").decode()


@torch.library.custom_op("nxdt::position_mask", mutates_args=())
def _position_mask(
    numbers: torch.Tensor,
    name: torch.Tensor,
    shape: Sequence[int],
    whole: Sequence[int],
    runs: Sequence[int],
    first_token: int,
    first_feature: int,
    kept_share: float,
    device: torch.device,
) -> torch.Tensor:
    """Draw the mask of ``shape`` [rows, tokens, features], out of one of ``whole`` [sequence, features] for each row.

    Args:
        numbers: seed, step and first row.
        name: encoded.
        shape: of the result.
        whole: of a row's mask.
        runs: as :attr:`MaskPart.runs` gives them.
        first_token: where the result begins among the tokens of these.
        first_feature: where it begins among the features.
        kept_share: probability with which an element is kept.
        device: of the result.
    """
    seed, step, first_row = numbers.tolist()
    module = decoded_name(name)
    rows, tokens, width = shape
    drawing = HOST if profile_of(device).host_random else device
    kept = torch.ones((rows, tokens, width), dtype=torch.bool, device=drawing)
    generator = torch.Generator(drawing)
    for row in range(rows):
        generator.manual_seed(_seed(seed, step, module, first_row + row))
        drawn = torch.empty(tuple(whole), dtype=torch.bool, device=drawing).bernoulli_(kept_share, generator=generator)
        held = [drawn[begin:end] for begin, end in zip(runs[::2], runs[1::2], strict=True)]
        own = (held[0] if len(held) == 1 else torch.cat(held)).narrow(0, first_token, tokens)
        own = own[:, first_feature : first_feature + width]
        kept[row, :, : own.shape[1]] = own  # features that fill a dimension up are zero anyway
    return kept.to(device)


@_position_mask.register_fake
def _(
    numbers: torch.Tensor,
    name: torch.Tensor,
    shape: Sequence[int],
    whole: Sequence[int],
    runs: Sequence[int],
    first_token: int,
    first_feature: int,
    kept_share: float,
    device: torch.device,
) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=torch.bool, device=device)


def _seed(seed: int, step: int, name: str, row: int) -> int:
    digest = hashlib.blake2b(f"{seed}\0{step}\0{name}\0{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
