"""Dropout masks by position: which elements of a token's features are kept depends only on the run's seed, the step,
the module, the row of the global batch and the position in the sequence. No layout changes it.

The mask of a row is drawn whole, [sequence, features], and each process takes its part. A process that holds only a
part of the row draws more than it needs, and drawing needs a byte per element. A function of each element, as for
initial weights, would cost more than the layer after the dropout.

For ``torch.compile``, drawing is one operator. It depends on tensors on the host, so that neither a step nor a layer
needs a separate graph.

Rows of experts have masks that are a function of each element, as for stochastic rounding: of the run's seed, the step,
the module, the token's place in the global batch, the expert and the feature. Rows reach an expert in an order that
depends on the layout, and often from other processes, so each row brings the number of its token. A dispatcher moves
these numbers as it moves hidden states: :func:`run_numbered` lets it run once more before, without gradients, over
tokens of eight features that spell them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.models.random.positions import noise, rounding_key
from nxdt_core.models.step_border import at_border
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.step_context import StepContext

__all__ = [
    "MaskPart",
    "RowPart",
    "TokenNumbers",
    "decoded_name",
    "encoded_name",
    "run_numbered",
    "step_numbers",
    "whole_sequence",
]

_NAME_BYTES = 128
"""Names of modules fill up to a multiple of this, so that those of all layers are tensors of one shape."""


def whole_sequence(length: int) -> Sequence[int]:
    """Return :attr:`MaskPart.runs` of a process that holds whole sequences."""
    return 0, length


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPart:
    """A process's part of the mask of one row, for one module; filled by engines."""

    name: torch.Tensor
    """:func:`encoded_name` of the module in the whole model."""
    shards: int = 1
    """Processes that share each sequence in equal parts."""
    runs: Callable[[int], Sequence[int]] = whole_sequence
    """Takes the length of the whole sequence. Returns the runs of neighbouring tokens that this process holds between
    tensor blocks' collectives: beginnings and ends, in one list."""
    sequence_parts: tuple[int, int] = (0, 1)
    """Index of this process's part of these tokens under sequence parallelism, and the number of parts."""
    features: tuple[int, int] | None = None
    """First feature of this process, and the number of features of the whole; None where ``feature_parts`` applies."""
    feature_parts: tuple[int, int] = (0, 1)
    """Index of its part of the features, and the number of equal parts; used where ``features`` is None."""

    def mask(self, hidden: torch.Tensor, p: float, step: StepContext) -> torch.Tensor | None:
        """Return what is kept of ``hidden`` [rows, tokens, features], of its shape; None where no row is known."""
        place = self._place(hidden, step)
        return None if place is None else _position_draw(*place, 1 - p, hidden.device)

    def noise(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor | None:
        """Return numbers of even probability within ±1, float32 of the shape of ``hidden``; as :meth:`mask`."""
        place = self._place(hidden, step)
        return None if place is None else _position_draw(*place, None, hidden.device)

    def _place(self, hidden: torch.Tensor, step: StepContext) -> tuple[Any, ...] | None:
        """The first arguments of the operator that draws."""
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
        return (
            numbers,
            self.name,
            list(hidden.shape),
            [length, features],
            list(self.runs(length)),
            0 if hidden.shape[1] == tokens else part * hidden.shape[1],
            begin,
        )


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


@torch.library.custom_op("nxdt::position_draw", mutates_args=())
def _position_draw(
    numbers: torch.Tensor,
    name: torch.Tensor,
    shape: Sequence[int],
    whole: Sequence[int],
    runs: Sequence[int],
    first_token: int,
    first_feature: int,
    kept_share: float | None,
    device: torch.device,
) -> torch.Tensor:
    """Draw for ``shape`` [rows, tokens, features], out of what is drawn for ``whole`` [sequence, features] in each row.

    Args:
        numbers: seed, step and first row.
        name: encoded.
        shape: shape of the result, [rows, tokens, features].
        whole: shape of what is drawn for a row, [sequence, features].
        runs: as :attr:`MaskPart.runs` gives them.
        first_token: index among the tokens of ``runs`` at which the result begins.
        first_feature: index of the result's first feature.
        kept_share: probability with which an element is kept, for a mask (bool); None for uniform numbers within ±1
            (float32).
        device: on which the result is needed.
    """
    seed, step, first_row = numbers.tolist()
    module = decoded_name(name)
    rows, tokens, width = shape
    drawing = HOST if profile_of(device).host_random else device
    generator = torch.Generator(drawing)
    out = torch.full(tuple(shape), 0 if kept_share is None else 1, dtype=_drawn_dtype(kept_share), device=drawing)
    in_place = [tokens, width] == list(whole)
    for row in range(rows):
        generator.manual_seed(_seed(seed, step, module, first_row + row))
        drawn = out[row] if in_place else torch.empty(tuple(whole), dtype=out.dtype, device=drawing)
        if kept_share is None:
            drawn.uniform_(-1.0, 1.0, generator=generator)
        else:
            drawn.bernoulli_(kept_share, generator=generator)
        if not in_place:
            parts = [drawn[begin:end] for begin, end in zip(runs[::2], runs[1::2], strict=True)]
            local = (parts[0] if len(parts) == 1 else torch.cat(parts)).narrow(0, first_token, tokens)
            local = local[:, first_feature : first_feature + width]
            out[row, :, : local.shape[1]] = local  # features that only fill a dimension up get no noise
    return out.to(device)


@_position_draw.register_fake
def _(
    numbers: torch.Tensor,
    name: torch.Tensor,
    shape: Sequence[int],
    whole: Sequence[int],
    runs: Sequence[int],
    first_token: int,
    first_feature: int,
    kept_share: float | None,
    device: torch.device,
) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=_drawn_dtype(kept_share), device=device)


def _drawn_dtype(kept_share: float | None) -> torch.dtype:
    return torch.float32 if kept_share is None else torch.bool


def _seed(seed: int, step: int, name: str, row: int) -> int:
    digest = hashlib.blake2b(f"{seed}\0{step}\0{name}\0{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


_BYTES = 8
"""Features of a spelled number. Each is a byte, which every dtype of activations holds exactly."""
_LEVELS = 1 << 16
"""Different values of :func:`noise`: probabilities are rounded to this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNumbers:
    """Numbers of a process's tokens in the global batch; engines put them into dispatchers."""

    shards: int = 1
    """Processes that share each sequence in equal parts; ``runs`` is as in :class:`MaskPart`."""
    runs: Callable[[int], Sequence[int]] = whole_sequence

    def of(self, tokens: int, device: torch.device, step: StepContext) -> torch.Tensor | None:
        """Return int64 [tokens]; None where the rows of the micro-batch are unknown, or it has other tokens."""
        numbers, ids = step.numbers, step.ids
        if numbers is None or ids is None or ids.numel() != tokens or ids.is_meta:
            return None
        rows, columns = ids.shape
        length = columns * self.shards
        token_numbers: torch.Tensor = _token_numbers(numbers, rows, length, list(self.runs(length)), device)
        return token_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """The masks of one module's rows; filled by engines."""

    name: torch.Tensor
    """:func:`~nxdt_core.models.random.dropout_masks.encoded_name` of the module in the whole model."""
    feature_part: int = 0
    """Index of the part of the features that this process holds; all parts are equal."""

    def mask(self, rows: torch.Tensor, p: float, step: StepContext) -> torch.Tensor | None:
        """Return what is kept of ``rows`` [..., features], of its shape; None where their tokens are unknown."""
        numbers, keys = step.numbers, step.expert_rows
        if numbers is None or keys is None or rows.is_meta:
            return None
        width = rows.shape[-1]
        first = self.feature_part * width
        mask: torch.Tensor = _row_mask(numbers, self.name, keys, width, first, p)
        return mask.view(rows.shape)


def run_numbered(
    run: Callable[[torch.Tensor, Any], torch.Tensor],
    hidden: torch.Tensor,
    experts: Callable[..., torch.Tensor],
    *,
    step: StepContext,
    numbers: torch.Tensor,
    count: int,
    rank: int,
) -> torch.Tensor:
    """Return ``run(hidden, experts)``, within which the dropouts of ``experts`` know the token of each row.

    Args:
        run: moves tokens [..., features] to experts and back; called twice.
        hidden: [..., features], the tokens.
        experts: called with rows, and perhaps with their groups.
        step: of the micro-batch; experts get it at the border, since dispatchers call them with rows alone.
        numbers: int64 [tokens], of :class:`TokenNumbers`.
        count: experts of the whole model.
        rank: which of equal parts of the experts this process has.
    """
    keys: list[torch.Tensor] = []

    def keep(rows: torch.Tensor, *groups: Any) -> torch.Tensor:
        keys.append(_keys(rows, *groups, count=count, rank=rank))
        return rows

    shifts = torch.arange(0, 8 * _BYTES, 8, device=numbers.device)
    spelled = (numbers.unsqueeze(-1) >> shifts).bitwise_and_(255)
    with torch.no_grad():
        run(spelled.to(hidden.dtype).view(*hidden.shape[:-1], _BYTES), keep)
    due: Iterator[torch.Tensor] = iter(keys)

    def numbered(rows: torch.Tensor, *groups: Any) -> torch.Tensor:
        with at_border(replace(step, expert_rows=next(due))):
            return experts(rows, *groups)

    return run(hidden, numbered)


def _keys(rows: torch.Tensor, groups: Any = None, *, count: int, rank: int) -> torch.Tensor:
    """Return a number for each row, of its token and its expert: int64 of the shape of ``rows`` without features."""
    shifts = torch.arange(0, 8 * _BYTES, 8, device=rows.device)
    tokens = (rows.to(torch.int64) << shifts).sum(-1)
    if groups is None:  # [experts, rows of each]
        experts = torch.arange(len(rows), device=rows.device).unsqueeze(1) + rank * len(rows)
    else:
        here = torch.arange(len(groups.counts), device=rows.device)
        experts = here.repeat_interleave(groups.counts, output_size=len(rows)) + rank * len(here)
    return tokens * count + experts


@torch.library.custom_op("nxdt::token_numbers", mutates_args=())
def _token_numbers(
    numbers: torch.Tensor, rows: int, length: int, runs: Sequence[int], device: torch.device
) -> torch.Tensor:
    first = int(numbers[2])
    places = torch.cat([torch.arange(begin, end) for begin, end in zip(runs[::2], runs[1::2], strict=True)])
    row = torch.arange(first, first + rows).unsqueeze(1)
    return (row * length + places).flatten().to(device)


@_token_numbers.register_fake
def _(numbers: torch.Tensor, rows: int, length: int, runs: Sequence[int], device: torch.device) -> torch.Tensor:
    own = sum(end - begin for begin, end in zip(runs[::2], runs[1::2], strict=True))
    return torch.empty(rows * own, dtype=torch.int64, device=device)


@torch.library.custom_op("nxdt::row_mask", mutates_args=())
def _row_mask(
    numbers: torch.Tensor, name: torch.Tensor, keys: torch.Tensor, width: int, first_feature: int, p: float
) -> torch.Tensor:
    """Draw the mask [*keys, width]. Each row gets two separate words, so that no two rows have shifted masks."""
    seed, step, _ = numbers.tolist()
    module = decoded_name(name)
    words = [
        torch.tensor(rounding_key(seed, f"{step}\0{module}\0{part}"), dtype=torch.int32, device=keys.device)
        for part in ("token", "step", "feature")
    ]
    low = keys.bitwise_and(0xFFFF_FFFF).to(torch.int32)
    high = (keys >> 32).to(torch.int32)
    start, stride = (_word(low, high, word).unsqueeze(-1) for word in words[:2])
    features = torch.arange(first_feature, first_feature + width, dtype=torch.int32, device=keys.device)
    return noise(start + features * (stride | 1), words[2]) >= round(p * _LEVELS)


@_row_mask.register_fake
def _(
    numbers: torch.Tensor, name: torch.Tensor, keys: torch.Tensor, width: int, first_feature: int, p: float
) -> torch.Tensor:
    return torch.empty(*keys.shape, width, dtype=torch.bool, device=keys.device)


def _word(low: torch.Tensor, high: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits for each row."""
    upper = noise(low + high * 0x3779B1, key)
    return (upper << 16) | noise(low ^ (upper * 0x5BD1E9), key)
