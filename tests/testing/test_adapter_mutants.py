"""The contract of adapters fails a wrong one in the requirements that it breaks, and in no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.mutants.adapter import MUTANTS
from tests.testing.outcomes import CaughtBy, Outcomes, assert_fails_where_wrong, every_third, run_mutants, without

FILE = Path(__file__).parent / "mutants/adapter.py"
NAMES, OWN = "test_the_base_keeps_its_names_and_shapes", "test_only_its_own_parameters_train"
FIRST, MOVES = "test_it_changes_nothing_at_first", "test_training_moves_its_own_parameters_and_no_others"
LOADED = "test_weights_that_are_loaded_compute_what_was_saved"
EVALUATED = "test_it_computes_the_same_in_training_and_evaluation"
MERGED = "test_merged_weights_compute_what_unmerged_ones_do"
TP, ZERO3 = (f"test_layouts_agree[{layout}]" for layout in ("tp", "zero3"))
CAUGHT_BY = {
    "Right": set(),
    "InheritsNothing": {"test_it_has_the_members_of_the_protocol"},
    "RenamesTheBase": {NAMES, "test_added_parameters_have_rules", FIRST, MERGED},
    "AllocatesAtOnce": {NAMES},
    "LeavesNormsTrained": {OWN, MOVES},
    "HasNoRuleForOne": {"test_added_parameters_have_rules", FIRST},
    "StartsElsewhere": {FIRST},
    "HasAnIdlePart": {MOVES},
    "WritesIntoTheBase": {MOVES, EVALUATED, ZERO3},
    "GrowsItsScale": {EVALUATED, LOADED, ZERO3},
    "UpdatesInTrainingAlone": {EVALUATED, MERGED},
    "ComparesAnotherKey": {"test_it_resumes_from_its_own_section"},
    "MergesWithoutItsScale": {MERGED},
    "FollowsNothing": {TP},
}


@pytest.fixture(scope="module")
def caught_by(request: pytest.FixtureRequest) -> CaughtBy:
    """``CAUGHT_BY``, by default with one layout: the same test compares all of them."""
    return without({ZERO3}, CAUGHT_BY, request)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, caught_by: CaughtBy) -> Outcomes:
    """How the tests of the file ended."""
    return run_mutants(FILE, caught_by, request)


# FollowsNothing is caught by the same test as WritesIntoTheBase, in another layout; both take two ranks.
@pytest.mark.parametrize("mutant", every_third(CAUGHT_BY, slow=["WritesIntoTheBase"]))
def test_the_contract_fails_a_mutant_where_it_is_wrong(
    outcomes: Outcomes, mutant: str, caught_by: CaughtBy, pytestconfig: pytest.Config
) -> None:
    assert_fails_where_wrong(outcomes, mutant, caught_by, pytestconfig)


def test_every_mutant_is_expected() -> None:
    assert {mutant.__name__ for mutant in MUTANTS} == CAUGHT_BY.keys()
