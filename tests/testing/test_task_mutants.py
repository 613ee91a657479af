"""The contract of task suites fails a wrong one in the requirements that it breaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from nxdt_testing.task_contract import TaskContract

from tests.testing.mutants.task import MUTANTS
from tests.testing.outcomes import Outcomes, every_third, requirements, run_mutants

FILE = Path(__file__).parent / "mutants/task.py"
EVERY = {name for name in dir(TaskContract) if name.startswith("test_")}
IS_ONE, UNKNOWN = "test_it_is_a_suite", "test_an_unknown_task_is_an_error_before_a_model_is_loaded"
FINITE, AGAIN = "test_each_task_has_finite_numbers_by_name", "test_it_finds_the_same_again"
LIMIT, LEAVES = "test_a_limit_leaves_records_out", "test_it_leaves_the_model_as_it_is"
CAUGHT_BY = {
    "Right": set(),
    "InheritsNothing": {IS_ONE},
    "FindsUnknownTasksLate": {UNKNOWN},
    "DoesNotNameTheTask": {UNKNOWN},
    "RaisesKeyError": {UNKNOWN},
    "ForgetsATask": {FINITE},
    "ReturnsTensors": {FINITE},
    "AddsATensor": {FINITE},
    "CountsItsRuns": {AGAIN},
    "IgnoresTheLimit": {LIMIT},
    "TrainsTheModel": {LEAVES},
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
