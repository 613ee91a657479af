"""A builder's key map, spelled out: which Hugging Face tensors make which parameter, and back.

No files here; :mod:`nxdt_core.checkpoint.hf` reads and writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from nxdt_core.errors import KeyMapIncomplete
from nxdt_core.protocols.model import KeyMap

__all__ = ["Source", "sources"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one parameter comes from."""

    name: str
    """The parameter's global name."""
    hf_names: tuple[str, ...]
    """Names in the directory, in order."""
    transform: str
    """As in :class:`~nxdt_core.protocols.model.KeyMap`."""
    sections: tuple[int, ...] = ()

    def read(self, fetch: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Make the parameter of the Hugging Face tensors, which ``fetch`` gives by name."""
        tensors = [fetch(name) for name in self.hf_names]
        if self.transform == "concat":
            return torch.cat(tensors)
        if self.transform == "stack":
            return torch.stack(tensors)
        return tensors[0].t().contiguous() if self.transform == "transpose" else tensors[0]

    def write(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The Hugging Face tensors of the parameter, by name; views where that is possible."""
        tensors: Iterable[torch.Tensor] = (parameter,)
        if self.transform == "concat":
            tensors = torch.split(parameter, list(self.sections))
        elif self.transform == "stack":
            tensors = parameter.unbind()
        elif self.transform == "transpose":
            tensors = (parameter.t(),)
        return dict(zip(self.hf_names, tensors, strict=True))


def sources(builder: str, key_map: Sequence[KeyMap], shapes: dict[str, torch.Size]) -> list[Source]:
    """One source for each parameter.

    Args:
        builder: named in errors.
        key_map: the builder's.
        shapes: of all parameters, by global name.

    Raises:
        KeyMapIncomplete: a parameter without an entry, or with one that cannot be its.
    """
    return [_source(builder, key_map, name, shape) for name, shape in shapes.items()]


def _source(builder: str, key_map: Sequence[KeyMap], name: str, shape: torch.Size) -> Source:
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
        return Source(name=name, hf_names=tuple(hf_names), transform=entry.transform, sections=entry.sections)
    raise KeyMapIncomplete(builder=builder, parameter=name, reason="no entry matches")


def _misfit(entry: KeyMap, shape: torch.Size) -> str | None:
    """Why the entry cannot describe a parameter of this shape, or None."""
    if entry.transform not in ("none", "transpose", "stack", "concat"):
        return f"there is no transform {entry.transform!r}"
    if entry.transform != "concat" and len(entry.hf_names) != 1:
        return f"transform {entry.transform!r} takes one name, not {len(entry.hf_names)}"
    if entry.transform == "transpose" and len(shape) != 2:
        return f"a tensor of shape {tuple(shape)} cannot be transposed"
    if entry.transform == "concat" and (len(entry.sections) != len(entry.hf_names) or sum(entry.sections) != shape[0]):
        return f"sections {entry.sections} do not add up to its {shape[0]} rows"
    return None


def _wildcards(pattern: str, name: str) -> list[str] | None:
    """What each ``*`` of ``pattern`` stands for in ``name``; None where they do not match."""
    match = re.fullmatch(r"([^.]+)".join(map(re.escape, pattern.split("*"))), name)
    return None if match is None else list(match.groups())


def _filled(pattern: str, values: Sequence[str]) -> str:
    """``pattern`` with its first wildcards filled in order; those beyond ``values`` stay."""
    for value in values:
        pattern = pattern.replace("*", value, 1)
    return pattern
