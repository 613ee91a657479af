"""The contract of callbacks fails a wrong one in the requirements that it breaks, and in no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sampling import slow_except
from tests.testing.mutants.callback import MUTANTS
from tests.testing.outcomes import CaughtBy, Outcomes, assert_fails_where_wrong, run_mutants, without

FILE = Path(__file__).parent / "mutants/callback.py"
IS_ONE, SAME = "test_it_is_a_callback_whose_methods_are_called", "test_a_run_with_it_has_the_losses_of_one_without"
RESUMED = "test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped"
STATE, THREAD = "test_its_state_comes_back", "test_it_leaves_no_thread"
RANKS = "test_two_ranks_finish"
CAUGHT_BY = {
    "Right": set(),
    "OnlyLooksLikeOne": {IS_ONE, SAME, RESUMED, STATE, THREAD, RANKS},
    "ScalesWeights": {SAME},
    "CountsItsWarmUpAgain": {RESUMED},
    "SavesASet": {SAME, RESUMED, STATE, THREAD, RANKS},
    "SavesWhatItDoesNotLoad": {STATE},
    "LoadsNothing": {STATE},
    "LeavesAThread": {THREAD},
    "WaitsOnTheFirstRank": {RANKS},
    "WaitsForBackward": {IS_ONE, SAME, RESUMED, STATE, THREAD, RANKS},
    "Fails": {SAME, RESUMED, STATE, RANKS},
}
SKIPS = {"CountsItsWarmUpAgain": {SAME}}
"""It says that it changes training."""


@pytest.fixture(scope="module")
def caught_by(request: pytest.FixtureRequest) -> CaughtBy:
    """``CAUGHT_BY``, by default without two ranks."""
    return without({RANKS}, CAUGHT_BY, request)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, caught_by: CaughtBy) -> Outcomes:
    """How the tests of the file ended."""
    return run_mutants(FILE, caught_by, request, "--samples=all")


DEFAULT = ("Right", "ScalesWeights", "CountsItsWarmUpAgain", "LoadsNothing", "LeavesAThread")
"""One for each test that trains; ``SavesASet`` fails all of them."""


@pytest.mark.parametrize("mutant", slow_except(CAUGHT_BY, DEFAULT))
def test_the_contract_fails_a_mutant_where_it_is_wrong(
    outcomes: Outcomes, mutant: str, caught_by: CaughtBy, pytestconfig: pytest.Config
) -> None:
    assert_fails_where_wrong(outcomes, mutant, caught_by, pytestconfig, SKIPS.get(mutant, set()))


def test_every_mutant_is_expected() -> None:
    assert {mutant.__name__ for mutant in MUTANTS} == CAUGHT_BY.keys()
