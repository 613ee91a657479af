"""Helpers of all contracts, without torch: fixtures, errors that fail a test, and where numbers of two runs differ."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["ComponentContract", "copied", "difference", "global_random_numbers_kept", "no_error"]


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
def no_error(message: str, *, but: type[Exception] = AssertionError) -> Iterator[None]:
    """Fail the test with ``said`` and the exception, where the block raises one that is not ``but``, nor asserts."""
    try:
        yield
    except (AssertionError, but):
        raise
    except Exception as error:
        pytest.fail(f"{message} {type(error).__name__}: {error}")


@contextmanager
def global_random_numbers_kept(message: str) -> Iterator[None]:
    """Fail the test with ``said`` where the block draws from the global generators of Python, NumPy or torch, or seeds
    them.

    A run draws from them, too, and saves their state.
    """
    import numpy as np
    import torch

    def states() -> dict[str, str]:
        own = {"random": random.getstate(), "numpy.random": np.random.get_state(), "torch": torch.get_rng_state()}
        return {name: repr(state.tolist() if hasattr(state, "tolist") else state) for name, state in own.items()}

    before = states()
    yield
    changed = [name for name, state in states().items() if state != before[name]]
    assert not changed, f"{message} the global random numbers of {', '.join(changed)}; use a separate generator"


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
