"""What contracts share, without torch: fixtures, errors that fail a test, and where numbers of two runs differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["ComponentContract", "copied", "difference", "no_error"]


class ComponentContract:
    """The fixtures of a component: override ``factory``, and ``section`` where it has options."""

    @pytest.fixture
    def factory(self) -> Any:
        """Return the target of the record."""
        raise NotImplementedError("override the fixture 'factory'")

    @pytest.fixture
    def section(self) -> Any:
        """Return the section's class; None for a component without options."""
        return None


@contextmanager
def no_error(said: str, *, but: type[Exception] = AssertionError) -> Iterator[None]:
    """Fail the test with ``said`` and the exception, where the block raises one that is not ``but``, nor asserts."""
    try:
        yield
    except (AssertionError, but):
        raise
    except Exception as error:
        pytest.fail(f"{said} {type(error).__name__}: {error}")


def copied(state: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return copies of the tensors of a state, or of named parameters, that later steps do not change."""
    return {name: value.detach().clone() for name, value in dict(state).items()}


def difference(
    found: Mapping[int, float],
    wanted: Mapping[int, float],
    where: str,
    *,
    of: str = "loss",
    rtol: float = 0.0,
    atol: float = 0.0,
) -> str:
    """Return where two runs first differ, such as "the loss of step 2 is 4.1, and 4.2 in one process"; "" if nowhere.

    Args:
        found: a number for each step.
        wanted: what they should be.
        where: which run ``wanted`` is of.
        of: what the numbers are.
        rtol: the allowed difference, relative; 0 compares exactly.
        atol: the allowed difference, absolute.
    """
    for step, expected in wanted.items():
        number = found.get(step, math.nan)
        if not math.isclose(number, expected, rel_tol=rtol, abs_tol=atol):
            return f"the {of} of step {step} is {number:.8g}, and {expected:.8g} {where}"
    return ""
