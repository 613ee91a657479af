"""How large a model may be that a file from elsewhere describes: no larger than its weights make possible. No torch.

A configuration of a few bytes can name a billion layers, and building a model takes memory for each. What a file of
weights says of itself is cheap to read, and its author had to write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nxdt_core.regular_files import open_regular, read_text

__all__ = ["oversized", "weights_in"]

_WEIGHTS = "model.safetensors"
_MOST_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""

_COUNTS = re.compile(r"(^|[_.])(num|n)_\w*(layer|expert|block)|layers$")
"""Keys that count modules, each of which has a tensor at least."""
_LENGTHS = re.compile(r"position|length|window|context|seq|seed")
"""Keys that no tensor of a model has as a size, or that a check of shapes compares."""

_FEWEST = 1000
"""Layers or experts that take little memory in any case: some parts of a model have no tensors in a directory."""
_SMALLEST = 2**24
"""A size that takes little memory in any case; above all token ids."""
_LONGEST = 2**32


def weights_in(directory: Path) -> tuple[int, int] | None:
    """Return the number of tensors and of bytes of the weights of a Hugging Face directory; None where it has none.

    Files that cannot be read have none: reading the weights explains them.
    """
    try:
        sizes = [path.stat().st_size for path in directory.glob("*.safetensors")]
        single = directory / _WEIGHTS
        names = (
            _header(single)
            if single.is_file()
            else json.loads(read_text(directory / f"{_WEIGHTS}.index.json", follow=True))["weight_map"]
        )
        return (len(names), sum(sizes)) if sizes else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def oversized(values: Mapping[str, Any], *, tensors: int, size_bytes: int) -> str | None:
    """Return why a model's configuration cannot be that of weights with so many tensors and bytes; None if it can.

    Args:
        values: keys of a ``config.json``, or of the section ``model``, at any depth.
        tensors: number of tensors of the weights.
        size_bytes: bytes of their files.
    """
    for key, value in _integers(values):
        if _COUNTS.search(key):
            limit = max(tensors, _FEWEST)
        else:
            limit = _LONGEST if _LENGTHS.search(key) else max(size_bytes, _SMALLEST)
        if value > limit:
            return f"{key} is {value}, too large for its weights (tensors: {tensors}, bytes: {size_bytes})"
    return None


def _header(path: Path) -> Mapping[str, Any]:
    with open(open_regular(path, follow=True), "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(min(size, _MOST_HEADER_BYTES)))
    return header


def _integers(value: object, key: str = "") -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _integers(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _integers(each, key)
