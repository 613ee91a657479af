"""A builder's key map, spelled out: which Hugging Face tensors make which parameter, and back.

No files here; :mod:`nxdt_core.hf.directory` reads and writes them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from nxdt_core.checkpoint.format.shards import filled_up
from nxdt_core.distributed.devices import meta_device
from nxdt_core.errors.models import KeyMapIncomplete, WeightsUnusable
from nxdt_core.protocols.model import KeyMap, ModelBuilder
from nxdt_core.protocols.tensor_shards import TensorSlice

__all__ = ["Source", "sources"]


_TRANSPOSED = {"transpose": "none", "interleave_transpose": "interleave", "part_transpose": "part"}
"""Transforms whose matrices are transposed in the directory → the one that they are then."""


class _Copy:
    """The transform ``none``, and the base of the others: from the tensors of a directory to a parameter, and back."""

    def __init__(self, shape: tuple[int, ...], sections: tuple[int, ...] = ()) -> None:
        """``shape``: of the whole parameter; ``sections``: as in :class:`~nxdt_core.protocols.model.KeyMap`."""
        self.shape, self.sections = shape, sections

    def problem(self, names: int) -> str | None:
        """Return why a parameter of this shape cannot be made of so many named tensors; None where it can."""
        return None

    def regions(self) -> list[TensorSlice]:
        """Return the region of the parameter that each tensor of the directory is, in their order."""
        return [TensorSlice.whole(self.shape)]

    def read(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the parameter that the tensors of the directory make."""
        return tensors[0]

    def hf_shape(self, region: TensorSlice) -> tuple[int, ...]:
        """Return the shape in the directory of a tensor that is ``region``."""
        return region.shape

    def write(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the directory for the elements of its region: a view, or a copy where rows move."""
        return elements

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the parameter as a view of a tensor of the directory that several share."""
        return whole

    def _rows(self, counts: Sequence[int]) -> list[TensorSlice]:
        """Return a region of each number of rows, one after the other."""
        rest = self.shape[1:]
        starts = accumulate(counts, initial=0)
        return [
            TensorSlice((first, *(0,) * len(rest)), (count, *rest))
            for first, count in zip(starts, counts, strict=False)
        ]


class _Stack(_Copy):
    """One tensor per expert, along a new leading dimension."""

    def regions(self) -> list[TensorSlice]:
        return self._rows((1,) * self.shape[0])

    def read(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([*tensors])

    def hf_shape(self, region: TensorSlice) -> tuple[int, ...]:
        return region.shape[1:]

    def write(self, elements: torch.Tensor) -> torch.Tensor:
        return elements.squeeze(0)


class _Concat(_Copy):
    """Several tensors along dimension 0."""

    def problem(self, names: int) -> str | None:
        if len(self.sections) != names or sum(self.sections) != self.shape[0]:
            return f"sections {self.sections} do not add up to its {self.shape[0]} rows"
        return None

    def regions(self) -> list[TensorSlice]:
        return self._rows(self.sections)

    def read(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*tensors])


class _Pad(_Concat):
    """Rows beyond those of the directory: the mean of the others where they are read, and not written.

    Exponentials of the mean are at most the others' mean (Jensen), so that ``n`` rows of a vocabulary raise a loss by
    at most ``log(1 + n / rows)``. Zeros would exceed logits below zero.
    """

    def problem(self, names: int) -> str | None:
        if len(self.sections) != 1 or not 0 < self.sections[0] <= self.shape[0]:
            return f"its {self.shape[0]} rows are not {self.sections} and padding"
        return None

    def read(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return filled_up(tensors[0], self.shape[0])


class _Interleave(_Copy):
    """Rows in groups of a kind, such as all queries, in the directory; in groups of a head here."""

    def problem(self, names: int) -> str | None:
        if len(self.sections) != 2 or self.shape[0] % math.prod(self.sections):
            return f"its {self.shape[0]} rows are not those of (kinds, heads) = {self.sections}"
        return None

    def read(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        kinds, heads = self.sections
        return _regrouped(tensors[0], kinds, heads)

    def write(self, elements: torch.Tensor) -> torch.Tensor:
        kinds, heads = self.sections
        return _regrouped(elements, heads, kinds)


class _Part(_Copy):
    """One of the parameters that share a tensor: of each expert's rows an equal part, or every n-th row."""

    def problem(self, names: int) -> str | None:
        if len(self.shape) < 2 or len(self.sections) != 3 or not 0 <= self.sections[0] < self.sections[1]:
            return f"{self.sections} are not (number, parts, alternating) of experts {self.shape}"
        return None

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        number, parts, alternating = self.sections
        return whole[:, number::parts] if alternating else whole.chunk(parts, 1)[number]

    def read(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.within(tensors[0]).contiguous()

    def hf_shape(self, region: TensorSlice) -> tuple[int, ...]:
        return region.shape[0], region.shape[1] * self.sections[1], *region.shape[2:]


_TRANSFORMS: Mapping[str, type[_Copy]] = {
    "none": _Copy,
    "stack": _Stack,
    "concat": _Concat,
    "pad": _Pad,
    "interleave": _Interleave,
    "part": _Part,
}
"""Transforms by their name in :class:`~nxdt_core.protocols.model.KeyMap`."""


class _Transposed(_Copy):
    """Another transform, of matrices that are transposed in the directory."""

    def __init__(self, inner: _Copy) -> None:
        super().__init__(inner.shape, inner.sections)
        self.inner = inner

    def problem(self, names: int) -> str | None:
        flat = f"a tensor of shape {self.shape} cannot be transposed" if len(self.shape) < 2 else None
        return self.inner.problem(names) or flat

    def read(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.inner.read([tensor.mT for tensor in tensors]).contiguous()

    def hf_shape(self, region: TensorSlice) -> tuple[int, ...]:
        *outer, rows, columns = self.inner.hf_shape(region)
        return *outer, columns, rows

    def write(self, elements: torch.Tensor) -> torch.Tensor:
        return self.inner.write(elements).mT

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        return self.inner.within(whole.mT)


def _transform(name: str, shape: tuple[int, ...], sections: tuple[int, ...]) -> _Copy:
    transform = _TRANSFORMS[_TRANSPOSED.get(name, name)](shape, sections)
    return _Transposed(transform) if name in _TRANSPOSED else transform


@dataclass(frozen=True, slots=True, kw_only=True)
class HFTensor:
    """One tensor of a Hugging Face directory, made of a region of one parameter, or part of one that several share."""

    name: str
    """Name of the tensor in the directory."""
    parameter: str
    """Global name of the parameter."""
    region: TensorSlice
    transform: _Copy
    """How the whole parameter is made of the tensors of the directory."""

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return self.transform.shape

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the tensor's shape in the directory."""
        return self.transform.hf_shape(self.region)


def room_for(parts: Sequence[HFTensor], dtype: torch.dtype) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
    """Return an empty tensor for the region of each part, and a function that makes the directory's tensor of them."""
    if len(parts) == 1:
        region = torch.empty(parts[0].region.shape, dtype=dtype)
        return [region], lambda: parts[0].transform.write(region)
    whole = torch.empty(parts[0].shape, dtype=dtype)
    return [part.transform.within(whole) for part in parts], lambda: whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The tensors of a directory that one parameter is read from."""

    name: str
    """Global name of the parameter."""
    shape: tuple[int, ...]
    """Shape of the parameter."""
    hf_names: tuple[str, ...]
    """Names in the directory, in order."""
    transform: str
    """Name of the transform, as in :class:`~nxdt_core.protocols.model.KeyMap`."""
    sections: tuple[int, ...] = ()

    def read(self, fetch: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Make the parameter of the Hugging Face tensors, which ``fetch`` gives by name.

        Raises:
            WeightsUnusable: one holds integers, NaN or infinity.
        """
        tensors = [fetch(name) for name in self.hf_names]
        for name, tensor in zip(self.hf_names, tensors, strict=True):
            if not tensor.is_floating_point():
                reason = f"it holds {tensor.dtype}, and weights are floating-point numbers"
                advice = "Export the model again in bfloat16, float16 or float32: quantized weights need their scales."
                raise WeightsUnusable(tensor=name, reason=reason, advice=advice)
            numbers = tensor.float() if tensor.element_size() == 1 else tensor  # torch finds no extremes of 8 bits
            if tensor.numel() and not all(extreme.isfinite() for extreme in numbers.aminmax()):
                advice = "Take weights from before they diverged, or download the file again."
                raise WeightsUnusable(tensor=name, reason="it holds NaN or infinity", advice=advice)
        return _transform(self.transform, self.shape, self.sections).read(tensors)

    def tensors(self) -> Iterator[HFTensor]:
        """Yield the Hugging Face tensors that the parameter is written as, in order."""
        transform = _transform(self.transform, self.shape, self.sections)
        for name, region in zip(self.hf_names, transform.regions(), strict=True):
            yield HFTensor(name=name, parameter=self.name, region=region, transform=transform)


def sources(builder: ModelBuilder, key_map: Sequence[KeyMap] | None = None) -> list[Source]:
    """Return one source for each parameter of the builder's model; a tied one once, under its owner.

    ``key_map`` gives other names than Hugging Face's; None takes the builder's.

    Raises:
        HFExchangeUnsupported: the builder has no key map.
        KeyMapIncomplete: a parameter without an entry, or with one that cannot be its.
    """
    key_map = builder.hf_key_map() if key_map is None else key_map
    with meta_device():
        module = builder.build()
    users = {user for _, user in builder.plan().tied}
    named = module.named_parameters(remove_duplicate=False)
    shapes = {name: tuple(parameter.shape) for name, parameter in named if name not in users}
    result = [_source(type(builder).__name__, key_map, name, shape) for name, shape in shapes.items()]
    shared: dict[str, list[Source]] = defaultdict(list)
    for source in result:
        if source.transform.startswith("part"):
            shared[source.hf_names[0]].append(source)
    for hf_name, sharing in shared.items():
        if len({source.sections for source in sharing}) != sharing[0].sections[1]:
            reason = f"'{hf_name}' has {sharing[0].sections[1]} parts, not {len(sharing)}"
            raise KeyMapIncomplete(builder=type(builder).__name__, parameter=sharing[0].name, reason=reason)
    return result


def _source(builder: str, key_map: Sequence[KeyMap], name: str, shape: tuple[int, ...]) -> Source:
    for entry in key_map:
        match = re.fullmatch(r"([^.]+)".join(map(re.escape, entry.name.split("*"))), name)
        if match is None:
            continue
        numbers = list(match.groups())
        if entry.transform not in {**_TRANSFORMS, **_TRANSPOSED}:
            reason: str | None = f"there is no transform {entry.transform!r}"
        elif len(entry.hf_names) != 1 and entry.transform != "concat":
            reason = f"transform {entry.transform!r} takes one name, not {len(entry.hf_names)}"
        else:
            reason = _transform(entry.transform, shape, entry.sections).problem(len(entry.hf_names))
        if reason:
            raise KeyMapIncomplete(builder=builder, parameter=name, reason=reason)
        hf_names = [_filled(hf_name, numbers) for hf_name in entry.hf_names]
        if entry.transform == "stack":
            hf_names = [_filled(hf_names[0], [str(expert)]) for expert in range(shape[0])]
        return Source(
            name=name, shape=shape, hf_names=tuple(hf_names), transform=entry.transform, sections=entry.sections
        )
    raise KeyMapIncomplete(builder=builder, parameter=name, reason="no entry matches")


def _regrouped(tensor: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Rows in ``outer`` groups of ``inner`` blocks each, as ``inner`` groups of ``outer`` blocks."""
    return tensor.reshape(outer, inner, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 2)


def _filled(pattern: str, values: Sequence[str]) -> str:
    """Return ``pattern`` with its first wildcards filled in order; those beyond ``values`` stay."""
    for value in values:
        pattern = pattern.replace("*", value, 1)
    return pattern
