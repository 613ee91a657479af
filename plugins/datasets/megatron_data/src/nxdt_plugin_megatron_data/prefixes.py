"""Files and shares of ``data_prefix`` and ``splits_string``, in each of the forms that NxD Training and NeMo take."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("train", "validation", "test")

Prefixes = Path | tuple[float | Path, ...]
"""One prefix; prefixes in a list; or weights and prefixes in turns."""

_SMALLEST = 1e-5
"""Share below which a set would come out visibly wrong in the table that blends are read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """Prefixes and their shares."""

    prefixes: tuple[Path, ...]
    shares: tuple[float, ...] | None
    """Sum 1; None takes each sample of each once."""

    def merged(self) -> Blend:
        """Return the blend with each prefix once, and the sum of its shares."""
        prefixes = tuple(dict.fromkeys(self.prefixes))
        if self.shares is None:
            return Blend(prefixes=prefixes, shares=None)
        pairs = list(zip(self.prefixes, self.shares, strict=True))
        shares = tuple(math.fsum(share for path, share in pairs if path == prefix) for prefix in prefixes)
        return Blend(prefixes=prefixes, shares=shares)


def read_blend(value: Prefixes) -> Blend:
    """Return the blend that a value without faults says."""
    if isinstance(value, Path):
        return Blend(prefixes=(value,), shares=None)
    paths = tuple(item for item in value if isinstance(item, Path))
    weights = [item for item in value if isinstance(item, float)]
    if not weights or len(paths) == 1:
        return Blend(prefixes=paths, shares=None)
    return Blend(prefixes=paths, shares=tuple(weight / math.fsum(weights) for weight in weights))


def find_faults(value: Prefixes | Mapping[str, Prefixes]) -> Iterator[str]:
    """Yield what is wrong with a value of ``data_prefix``."""
    if isinstance(value, Mapping):
        for name, prefixes in value.items():
            if name not in SPLITS:
                yield f"{name!r} is not a split; splits are {', '.join(SPLITS)}"
            yield from (f"{name}: {fault}" for fault in find_faults(prefixes))
        if not value:
            yield "no prefix is named; give at least one"
    elif isinstance(value, tuple):
        yield from _list_faults(value)


def _list_faults(value: tuple[float | Path, ...]) -> Iterator[str]:
    weights = [item for item in value if isinstance(item, float)]
    if not value:
        yield "no prefix is named; give at least one"
    elif weights and [isinstance(item, float) for item in value] != [True, False] * (len(value) // 2):
        yield "weights and prefixes take turns, a weight (a number without quotes) before each prefix"
    elif any(weight <= 0 for weight in weights):
        yield "weights are positive; leave a set out that nothing is to be taken of"
    elif weights and min(weights) < _SMALLEST * math.fsum(weights):
        yield f"the weight {min(weights):g} is less than {_SMALLEST:g} of their sum"


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last part of each path, with as many parts before it as make it unique."""
    return [_short_name(path, [other for other in paths if other != path]) for path in paths]


def _short_name(path: Path, others: Sequence[Path]) -> str:
    for count in range(1, len(path.parts)):
        tail = path.parts[-count:]
        if all(other.parts[-count:] != tail for other in others):
            return "/".join(tail)
    return str(path)


def read_shares(text: str) -> tuple[float, float, float]:
    """Shares of train, validation and test, with the sum 1: ``"980,10,10"`` or ``"98/1/1"``.

    Raises:
        ValueError: it is not one to three numbers, or all of them are 0.
    """
    parts = [part for part in re.split(r"[,/\s]+", text.strip()) if part]
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or not all(0 <= number < math.inf for number in numbers) or not sum(numbers):
        raise ValueError(f"{text!r} is not a list of up to three shares such as '980,10,10'")
    first, second, third = (*numbers, 0.0, 0.0)[:3]
    total = sum(numbers)
    return first / total, second / total, third / total


def split_bounds(shares: tuple[float, float, float], sequences: int) -> tuple[range, range, range]:
    """Return the sequences of a file that each split has, rounded as Megatron-Core rounds them."""
    ends = (shares[0], shares[0] + shares[1], shares[0] + shares[1] + shares[2])
    first, second, third = (round(end * sequences) for end in ends)
    return range(first), range(first, second), range(second, third)
