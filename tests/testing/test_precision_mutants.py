"""The contract of precision policies fails a wrong one in the requirements that it breaks, and in no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.mutants.precision import MUTANTS
from tests.testing.outcomes import Outcomes, assert_fails_where_wrong, every_third, run_mutants

FILE = Path(__file__).parent / "mutants/precision.py"
KNOWN, AGREE = "test_it_is_a_policy_of_known_dtypes", "test_its_dtypes_agree"
TRAINS, SMALL = "test_it_trains_as_float32_does", "test_small_updates_are_not_lost"
CAUGHT_BY = {
    "Right": set(),
    "ReturnsADtype": {KNOWN, AGREE, TRAINS, SMALL},
    "HasNoName": {KNOWN},
    "CountsItsCalls": {"test_the_same_section_gives_the_same_policy"},
    "ImportsNumpy": {"test_its_module_imports_nothing_heavy"},
    "KeepsMastersOfFloat32": {AGREE},
    "SumsInLess": {AGREE},
    "LosesSmallUpdates": {SMALL},
    "UpdatesInFloat16": {TRAINS},
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
