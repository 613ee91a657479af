"""How much of a matrix of cases a run of the tests takes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TypeVar

import pytest

__all__ = ["of_matrix"]

Case = TypeVar("Case")


def of_matrix(config: pytest.Config, cases: Iterable[Case], sample: int) -> list[Case]:
    """All cases under ``--matrix=full``, else ``sample`` of them, by the seed that the option gives."""
    wanted = config.getoption("--matrix")
    return [*cases] if wanted == "full" else random.Random(int(wanted)).sample([*cases], sample)
