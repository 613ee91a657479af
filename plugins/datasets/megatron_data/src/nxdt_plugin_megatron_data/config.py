"""The keys of ``data:`` that belong to ``name: megatron-data``, and the files and shares that they mean, in each of the
forms that NxD Training and NeMo take. Importing this costs nothing: no torch, no numpy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from nxdt_core.config.section import Section, Written

SPLITS = ("train", "validation", "test")

Prefixes = Path | tuple[float | Path, ...]
"""One prefix; prefixes in a list; or weights and prefixes in turns."""

_SMALLEST = 1e-5
"""Share below which a set would come out visibly wrong in the table that blends are read from."""


class MegatronDataConfig(Section):
    """Tokens in Megatron's ``.bin/.idx`` files; ``nxdt data preprocess`` makes them."""

    data_prefix: Prefixes | Mapping[str, Prefixes]
    """Paths without ``.bin`` and ``.idx``: one; a list of several, each sample of which is taken once a pass; weights
    and paths in turns, ``[0.3, /data/books, 0.7, /data/web]``; or any of these for each split, under the keys
    ``train``, ``validation`` and ``test``."""
    splits_string: str | None = None
    """Shares of training, validation and test documents in every file, such as ``"980,10,10"``; null uses all documents
    for training. It has no effect if ``data_prefix`` lists files for each split."""
    index_mapping_dir: Annotated[Path | None, Written()] = None
    """Directory that keeps indices for later starts and for other processes; null keeps them next to each file."""
    reset_attention_mask: bool = False
    """Keep documents apart that share a sample: attention does not reach from one into another, and the first token
    of a document is not a label."""
    reset_position_ids: bool = False
    """Let positions restart at 0 with each document of a sample."""
    eod_mask_loss: bool = False
    """Leave the positions out of the loss whose input is the end-of-document token."""
    no_seqlen_plus_one_input_tokens: bool = False
    """Make samples of ``seq_length`` tokens, the last of which has no label, instead of one more that is the last
    label and the first token of the next sample."""
    validation_drop_last: bool = True
    """Leave out what is left behind the last whole sample of the validation split; false fills it up."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work with any files, as (key, message)."""
        for fault in find_faults(self.data_prefix):
            yield "data_prefix", fault
        if self.splits_string is not None and not isinstance(self.data_prefix, Mapping):
            try:
                read_shares(self.splits_string)
            except ValueError as error:
                yield "splits_string", str(error)


def read_blend(value: Prefixes) -> tuple[tuple[Path, ...], tuple[float, ...] | None]:
    """Return the prefixes that a value without faults names, and their shares, which have the sum 1; None takes each
    sample of each once."""
    items = (value,) if isinstance(value, Path) else value
    paths = tuple(item for item in items if isinstance(item, Path))
    weights = [item for item in items if isinstance(item, float)]
    if not weights or len(paths) == 1:
        return paths, None
    return paths, tuple(weight / math.fsum(weights) for weight in weights)


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
    names = []
    for path in paths:
        tails = ({other.parts[-count:] for other in paths if other != path} for count in range(1, len(path.parts)))
        count = next((count for count, others in enumerate(tails, 1) if path.parts[-count:] not in others), 0)
        names.append("/".join(path.parts[-count:]) if count else str(path))
    return names


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
