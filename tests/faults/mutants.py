"""Wrong ways to save, which the tests of faults must notice; applied in the processes that save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["MUTANTS"]

Arguments = dict[str, Any]


def _none(arguments: Arguments) -> Arguments:
    return arguments


MUTANTS: dict[str, Callable[[Arguments], Arguments]] = {"none": _none}
