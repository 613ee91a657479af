"""The contract of loggers fails a wrong one in the requirements that it breaks, and in no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.mutants.logger import MUTANTS
from tests.testing.outcomes import Outcomes, assert_fails_where_wrong, every_third, run_mutants

FILE = Path(__file__).parent / "mutants/logger.py"
LOSSES = "test_it_has_the_losses_of_each_step_and_changes_none"
CAUGHT_BY = {
    "Right": set(),
    "OnlyLooksLikeOne": {LOSSES},
    "CountsItsCalls": {LOSSES},
    "WritesOverEarlierFigures": {LOSSES},
    "LeavesAThread": {LOSSES},
    "RefusesNaN": {"test_it_takes_numbers_that_are_not_finite"},
}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    """How the tests of the file ended."""
    return run_mutants(FILE, CAUGHT_BY, request)


@pytest.mark.parametrize("mutant", every_third(CAUGHT_BY))
def test_the_contract_fails_a_mutant_where_it_is_wrong(
    outcomes: Outcomes, mutant: str, pytestconfig: pytest.Config
) -> None:
    assert_fails_where_wrong(outcomes, mutant, CAUGHT_BY, pytestconfig)


def test_every_mutant_is_expected() -> None:
    assert {mutant.__name__ for mutant in MUTANTS} == CAUGHT_BY.keys()
