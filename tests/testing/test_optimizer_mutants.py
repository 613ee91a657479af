"""The contract of optimizers fails a wrong one in the requirements that it breaks, and in no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sampling import takes_all
from tests.testing.mutants.optimizer import MUTANTS
from tests.testing.outcomes import Outcomes, run_contract

FILE = Path(__file__).parent / "mutants/optimizer.py"
GROUPS, MOVES = "test_it_has_the_groups_that_it_was_given", "test_a_step_moves_every_parameter_that_has_a_gradient"
RATE, DECAY = "test_the_rate_is_that_of_the_group_at_each_step", "test_a_group_without_decay_does_not_decay"
EXACT, STATE = "test_updates_in_float32_are_near_those_in_float64", "test_state_is_kept_by_parameter_alone"
RESUMED = "test_a_resumed_run_steps_as_one_that_was_not_stopped"
NOTHING = "test_a_rank_may_have_no_element_of_a_parameter"
SHARDS = {"test_shards_are_updated_as_the_whole_is"}
CAUGHT_BY = {
    "Right": set(),
    "MakesAGroupOfItsOwn": {GROUPS, DECAY},
    "StepsTheFirstGroupAlone": {MOVES},
    "MovesWithoutAGradient": {MOVES},
    "TakesTheRateOfTheSection": {RATE},
    "DecaysAllAlike": {DECAY},
    "LosesDigitsInADifference": {EXACT},
    "CountsItsSteps": {STATE, RESUMED},
    "KeepsMomentumInAList": {STATE, RESUMED},
    "KeepsAListAsState": {STATE},
    "KeepsTheGradientItself": {RATE, EXACT, RESUMED},
    "AsksForTheLargestElement": {NOTHING},
    "DividesByTheNormOfItsShard": SHARDS,
    "KeepsANumberForEachRowOfItsShard": SHARDS,
    "SumsOverTheInnermostGroup": SHARDS,
    "SumsOverTheOutermostGroup": SHARDS,
    "LeavesRanksWithoutAGradientOut": SHARDS,
    "MakesUpdatesOrthogonal": set(),
}
RIGHT = ("Right", "MakesUpdatesOrthogonal")
ALONE = {GROUPS, MOVES, RATE, DECAY, EXACT, STATE, RESUMED, NOTHING}
ON_RANKS = {*RIGHT, *(name for name, tests in CAUGHT_BY.items() if tests == SHARDS)}
"""Mutants that are tried on ranks, too: it takes a second each."""
OFTEN = {"MakesUpdatesOrthogonal", "SumsOverTheInnermostGroup"}
"""Those of them that are tried by default."""


@pytest.fixture(scope="module")
def tried(pytestconfig: pytest.Config) -> dict[str, set[str]]:
    """The tests of each: those of one process, and of some those on ranks."""
    on_ranks = ON_RANKS if takes_all(pytestconfig) else OFTEN
    return {name: ALONE | SHARDS if name in on_ranks else ALONE for name in CAUGHT_BY}


@pytest.fixture(scope="module")
def outcomes(tried: dict[str, set[str]]) -> Outcomes:
    """How the tests of the file ended."""
    return run_contract(FILE, (), [(name, test) for name, tests in tried.items() for test in tests])


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_the_contract_fails_a_mutant_where_it_is_wrong(
    outcomes: Outcomes, tried: dict[str, set[str]], mutant: str
) -> None:
    broken = CAUGHT_BY[mutant] & tried[mutant]
    assert broken or mutant in RIGHT or not CAUGHT_BY[mutant] <= tried[mutant]
    assert {test for name, test in outcomes.failed if name == mutant} == broken
    assert {test for name, test in outcomes.passed if name == mutant} == tried[mutant] - broken


def test_every_mutant_is_expected() -> None:
    assert {mutant.__name__ for mutant in MUTANTS} == CAUGHT_BY.keys()
