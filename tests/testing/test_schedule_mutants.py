"""The contract of learning-rate schedules fails a wrong one in the requirements that it breaks, and in no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.mutants.schedule import MUTANTS
from tests.testing.outcomes import Outcomes, run_contract

FILE = Path(__file__).parent / "mutants/schedule.py"
FINITE, END = "test_every_step_has_a_finite_factor", "test_steps_after_the_end_have_a_factor"
ONE, RESUMED = "test_a_step_has_one_factor", "test_a_resumed_run_has_the_factors_of_one_that_was_not_stopped"
RATES = "test_it_gives_factors_and_not_rates"
APART = "test_schedules_of_two_runs_share_nothing"
CAUGHT_BY = {
    "Right": set(),
    "CountsItsCalls": {ONE, RESUMED},
    "CountsOnceWarm": {RESUMED},
    "ReadsTheClock": {ONE, RESUMED, APART},
    "DrawsAtRandom": {ONE, RESUMED, APART},
    "GoesBelowZero": {FINITE},
    "ReturnsATensor": {FINITE},
    "DividesByWhatIsLeft": {END},
    "KeepsOptionsInItsModule": {APART},
    "ReturnsTheRate": {RATES},
}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Of all under all tests."""
    return run_contract(FILE, CAUGHT_BY, {})


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_the_contract_fails_a_mutant_where_it_is_wrong(outcomes: Outcomes, mutant: str) -> None:
    assert {test for name, test in outcomes.failed if name == mutant} == CAUGHT_BY[mutant]
    assert {test for name, test in outcomes.passed if name == mutant} | CAUGHT_BY[mutant] == {
        FINITE,
        END,
        ONE,
        RESUMED,
        APART,
        RATES,
    }


def test_every_mutant_is_expected() -> None:
    assert {mutant.__name__ for mutant in MUTANTS} == CAUGHT_BY.keys()
