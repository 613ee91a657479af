"""Tests that every metric must pass; its author subclasses it once.

Example, the whole test file of a plugin::

    from nxdt_testing.metric_contract import MetricContract

    class TestMyMetric(MetricContract):
        @pytest.fixture
        def factory(self):
            return MyMetric
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import pytest

from nxdt_core.protocols.evaluation import Metric
from nxdt_testing.contract import ComponentContract, no_error

__all__ = ["MetricContract"]

_ANSWERS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "right": (("Paris", "four", "a b c"), ("Paris", "four", "a b c")),
    "wrong": (("Paris", "four", "a b c"), ("Rome", "eight", "x y z")),
    "half": (("Paris", "four"), ("Paris", "it is eight")),
    "empty": (("Paris", "four"), ("", "")),
    "nothing wanted": (("",), ("four",)),
    "one": (("four",), ("it is four",)),
    "other scripts": (("東京です", "Привет, мир"), ("東京", "привет мир")),
    "long": (("a " * 500,), ("b " * 700,)),
}
"""Wanted and given answers that a run of an evaluation may have."""


class MetricContract(ComponentContract):
    """The tests of a metric: subclass it and override the fixture ``factory``."""

    def test_it_is_a_metric(self, factory: Callable[[], Metric]) -> None:
        """It is made without arguments, and has the method of the protocol."""
        assert isinstance(factory(), Metric), "inherit from nxdt_core.protocols.evaluation.Metric"

    @pytest.mark.parametrize("answers", _ANSWERS)
    def test_it_returns_finite_numbers_by_name(self, factory: Callable[[], Metric], answers: str) -> None:
        """`nxdt evaluate --json` writes them: no tensors, no NaN, names as text."""
        for name, number in _computed(factory(), answers).items():
            assert isinstance(name, str), f"names must be text; one is {name!r}"
            plain = isinstance(number, (int, float)) and not isinstance(number, bool)
            assert plain, f"{name} must be a Python number; it is {number!r} of type {type(number).__name__}"
            assert math.isfinite(number), f"{name} is {number!r} for {answers} answers; return a finite number"

    def test_its_names_do_not_depend_on_the_answers(self, factory: Callable[[], Metric]) -> None:
        """Rows of two evaluations have the same columns."""
        first = _computed(factory(), "right").keys()
        for answers in _ANSWERS:
            names = _computed(factory(), answers).keys()
            assert names == first, f"{answers} answers have the names {sorted(names)}, right ones {sorted(first)}"

    def test_it_computes_the_same_again(self, factory: Callable[[], Metric]) -> None:
        """From the answers of one call alone: no state, and no random numbers that are not seeded."""
        metric = factory()
        first = _computed(metric, "half")
        _computed(metric, "wrong")
        for again in (_computed(metric, "half"), _computed(factory(), "half")):
            assert again == first, f"the same answers give {again} after {first}"

    def test_it_leaves_the_answers_as_they_are(self, factory: Callable[[], Metric]) -> None:
        """Other metrics get the same lists."""
        expected, predicted = (list(answers) for answers in _ANSWERS["half"])
        factory().compute(expected, predicted)
        assert (expected, predicted) == tuple(map(list, _ANSWERS["half"])), (
            f"compute must not change the answers; it left {expected} and {predicted}"
        )


def _computed(metric: Metric, answers: str) -> Mapping[str, float]:
    expected, predicted = _ANSWERS[answers]
    with no_error(f"for {answers} answers compute raised"):
        numbers = metric.compute(list(expected), list(predicted))
    assert isinstance(numbers, Mapping), f"compute must return numbers by name; it returned {numbers!r}"
    assert numbers, f"compute returned no number for {answers} answers"
    return numbers
