"""The contract of metrics fails a wrong one in the requirements that it breaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from nxdt_testing.metric_contract import MetricContract

from tests.testing.mutants.metric import MUTANTS
from tests.testing.outcomes import Outcomes, every_third, requirements, run_mutants

FILE = Path(__file__).parent / "mutants/metric.py"
EVERY = {name for name in dir(MetricContract) if name.startswith("test_")}
IS_ONE, FINITE = "test_it_is_a_metric", "test_it_returns_finite_numbers_by_name"
NAMES, AGAIN = "test_its_names_do_not_depend_on_the_answers", "test_it_computes_the_same_again"
LEAVES = "test_it_leaves_the_answers_as_they_are"
CAUGHT_BY = {
    "Right": set(),
    "IsCalled": EVERY,
    "ReturnsATensor": {FINITE},
    "ReturnsOneNumber": {FINITE, NAMES, AGAIN},
    "DividesByItsMatches": {FINITE, NAMES, AGAIN},
    "IsNotANumberWithoutMatches": {FINITE},
    "TakesTheFirstWord": {FINITE, NAMES},
    "NamesMatchesAlone": {NAMES},
    "SumsOverCalls": {AGAIN},
    "StripsInPlace": {LEAVES},
}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    """How the tests of the file ended."""
    return run_mutants(FILE, CAUGHT_BY, request)


@pytest.mark.parametrize("mutant", every_third(CAUGHT_BY))
def test_the_contract_fails_a_mutant_where_it_is_wrong(outcomes: Outcomes, mutant: str) -> None:
    assert requirements(outcomes.failed, mutant) == CAUGHT_BY[mutant]


def test_every_requirement_is_met_by_the_right_one_and_broken_by_a_mutant(outcomes: Outcomes) -> None:
    assert requirements(outcomes.passed, "Right") == EVERY
    assert set().union(*CAUGHT_BY.values()) == EVERY


def test_every_mutant_is_expected() -> None:
    assert {mutant.__name__ for mutant in MUTANTS} == CAUGHT_BY.keys()
