"""A builder's key map, spelled out: which Hugging Face tensors make which parameter, and back.

No files here; :mod:`nxdt_core.checkpoint.hf.directory` reads and writes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from nxdt_core.errors.models import HFExchangeUnsupported, KeyMapIncomplete, WeightsUnusable
from nxdt_core.protocols.model import HFExchange, KeyMap, ModelBuilder
from nxdt_core.protocols.piece import Box

__all__ = ["HFTensor", "Source", "exchange_of", "sources"]

_TRANSPOSED = ("transpose", "interleave_transpose")
_INTERLEAVED = ("interleave", "interleave_transpose")


@dataclass(frozen=True, slots=True, kw_only=True)
class HFTensor:
    """One tensor of a Hugging Face directory, made of a box of one parameter."""

    name: str
    """In the directory."""
    parameter: str
    """Global name of the parameter."""
    parameter_shape: tuple[int, ...]
    """Of the whole parameter."""
    box: Box
    transform: str
    sections: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the tensor's shape in the directory."""
        if self.transform == "stack":
            return self.box.shape[1:]
        return self.box.shape[::-1] if self.transform in _TRANSPOSED else self.box.shape

    def of(self, box: torch.Tensor) -> torch.Tensor:
        """Return the tensor, as a view of the elements of its box; a copy where rows change places."""
        if self.transform == "stack":
            return box.squeeze(0)
        if self.transform in _INTERLEAVED:
            kinds, heads = self.sections
            box = _regrouped(box, heads, kinds)
        return box.t() if self.transform in _TRANSPOSED else box


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one parameter comes from."""

    name: str
    """The parameter's global name."""
    shape: tuple[int, ...]
    """The parameter's."""
    hf_names: tuple[str, ...]
    """Names in the directory, in order."""
    transform: str
    """As in :class:`~nxdt_core.protocols.model.KeyMap`."""
    sections: tuple[int, ...] = ()

    def read(self, fetch: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Make the parameter of the Hugging Face tensors, which ``fetch`` gives by name.

        Raises:
            WeightsUnusable: one holds integers, NaN or infinity.
        """
        tensors = [_usable(name, fetch(name)) for name in self.hf_names]
        if self.transform == "pad":
            return _padded(tensors[0], self.shape[0])
        if self.transform == "concat":
            return torch.cat(tensors)
        if self.transform == "stack":
            return torch.stack(tensors)
        tensor = tensors[0].t().contiguous() if self.transform in _TRANSPOSED else tensors[0]
        return _regrouped(tensor, *self.sections) if self.transform in _INTERLEAVED else tensor

    def tensors(self) -> Iterator[HFTensor]:
        """Yield the Hugging Face tensors that the parameter is written as, in order."""
        for name, box in zip(self.hf_names, self._boxes(), strict=True):
            yield HFTensor(
                name=name,
                parameter=self.name,
                parameter_shape=self.shape,
                box=box,
                transform=self.transform,
                sections=self.sections,
            )

    def _boxes(self) -> Iterator[Box]:
        if self.transform not in ("concat", "stack", "pad"):
            yield Box.whole(self.shape)
            return
        rows = (1,) * self.shape[0] if self.transform == "stack" else self.sections
        rest = self.shape[1:]
        for start, count in zip(accumulate(rows, initial=0), rows, strict=False):
            yield Box((start, *(0,) * len(rest)), (count, *rest))


def exchange_of(builder: ModelBuilder) -> HFExchange:
    """Return the builder, seen as one that exchanges with Hugging Face.

    Raises:
        HFExchangeUnsupported: it does not.
    """
    if not isinstance(builder, HFExchange):
        raise HFExchangeUnsupported(builder=type(builder).__name__)
    return builder


def sources(builder: ModelBuilder) -> list[Source]:
    """Return one source for each parameter of the builder's model; a tied one once, under its owner.

    Raises:
        HFExchangeUnsupported: the builder has no key map.
        KeyMapIncomplete: a parameter without an entry, or with one that cannot be its.
    """
    key_map = exchange_of(builder).hf_key_map()
    with torch.device("meta"):
        module = builder.build()
    users = {user for _, user in builder.plan().tied}
    named = module.named_parameters(remove_duplicate=False)
    shapes = {name: tuple(parameter.shape) for name, parameter in named if name not in users}
    return [_source(type(builder).__name__, key_map, name, shape) for name, shape in shapes.items()]


def _source(builder: str, key_map: Sequence[KeyMap], name: str, shape: tuple[int, ...]) -> Source:
    for entry in key_map:
        numbers = _wildcards(entry.name, name)
        if numbers is None:
            continue
        reason = _misfit(entry, shape)
        if reason:
            raise KeyMapIncomplete(builder=builder, parameter=name, reason=reason)
        hf_names = [_filled(hf_name, numbers) for hf_name in entry.hf_names]
        if entry.transform == "stack":
            hf_names = [_filled(hf_names[0], [str(expert)]) for expert in range(shape[0])]
        return Source(
            name=name, shape=shape, hf_names=tuple(hf_names), transform=entry.transform, sections=entry.sections
        )
    raise KeyMapIncomplete(builder=builder, parameter=name, reason="no entry matches")


def _misfit(entry: KeyMap, shape: tuple[int, ...]) -> str | None:
    """Why the entry cannot describe a parameter of this shape, or None."""
    if entry.transform not in ("none", "stack", "concat", "pad", *_TRANSPOSED, *_INTERLEAVED):
        return f"there is no transform {entry.transform!r}"
    if entry.transform != "concat" and len(entry.hf_names) != 1:
        return f"transform {entry.transform!r} takes one name, not {len(entry.hf_names)}"
    if entry.transform in _TRANSPOSED and len(shape) != 2:
        return f"a tensor of shape {shape} cannot be transposed"
    if entry.transform == "concat" and (len(entry.sections) != len(entry.hf_names) or sum(entry.sections) != shape[0]):
        return f"sections {entry.sections} do not add up to its {shape[0]} rows"
    if entry.transform == "pad" and (len(entry.sections) != 1 or not 0 < entry.sections[0] <= shape[0]):
        return f"its {shape[0]} rows are not {entry.sections} and padding"
    if entry.transform in _INTERLEAVED and (len(entry.sections) != 2 or shape[0] % math.prod(entry.sections)):
        return f"its {shape[0]} rows are not those of (kinds, heads) = {entry.sections}"
    return None


def _usable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        reason = f"it holds {tensor.dtype}, and weights are floating-point numbers"
        advice = "Export the model again in bfloat16, float16 or float32: quantized weights need their scales."
        raise WeightsUnusable(tensor=name, reason=reason, advice=advice)
    numbers = tensor.float() if tensor.element_size() == 1 else tensor  # torch finds no extremes of 8 bits
    if tensor.numel() and not all(extreme.isfinite() for extreme in numbers.aminmax()):
        advice = "Take weights from before they diverged, or download the file again."
        raise WeightsUnusable(tensor=name, reason="it holds NaN or infinity", advice=advice)
    return tensor


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """With rows that are the mean of all: as a vocabulary's, their exponentials are at most the others' mean (Jensen),
    so that ``n`` of them raise a loss by ``log(1 + n / rows)`` at the most. Zeros would drown logits below zero."""
    mean = tensor.mean(0, keepdim=True, dtype=torch.float32).to(tensor.dtype)
    return torch.cat([tensor, mean.expand(rows - tensor.shape[0], *tensor.shape[1:])])


def _regrouped(tensor: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Rows in ``outer`` groups of ``inner`` blocks each, as ``inner`` groups of ``outer`` blocks."""
    return tensor.reshape(outer, inner, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 2)


def _wildcards(pattern: str, name: str) -> list[str] | None:
    """What each ``*`` of ``pattern`` stands for in ``name``; None where they do not match."""
    match = re.fullmatch(r"([^.]+)".join(map(re.escape, pattern.split("*"))), name)
    return None if match is None else list(match.groups())


def _filled(pattern: str, values: Sequence[str]) -> str:
    """``pattern`` with its first wildcards filled in order; those beyond ``values`` stay."""
    for value in values:
        pattern = pattern.replace("*", value, 1)
    return pattern
