"""The contract of configuration migrations fails a wrong one in the requirements that it breaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from nxdt_testing.migration_contract import MigrationContract

from tests.testing.mutants.migration import MUTANTS
from tests.testing.outcomes import Outcomes, every_third, requirements, run_mutants

FILE = Path(__file__).parent / "mutants/migration.py"
EVERY = {name for name in dir(MigrationContract) if name.startswith("test_")}
IS_ONE, LIGHT = "test_it_is_a_migration", "test_its_module_imports_nothing_heavy"
RECOGNISES, REFUSES = "test_it_recognises_its_files_and_no_others", "test_what_another_program_wrote_is_refused"
KEYS, FILE_HAS = "test_every_key_is_accounted_for", "test_the_file_has_what_the_report_says"
WRITES, EXPLAINS = "test_it_writes_nothing_and_says_the_same_again", "test_it_explains_its_keys_and_no_others"
OVERRIDES = "test_an_override_replaces_the_value_of_the_file"
NOTE = "test_it_says_nothing_of_an_environment_without_its_variables"
CAUGHT_BY = {
    "Right": set(),
    "InheritsNothing": {IS_ONE},
    "ImportsNumpy": {LIGHT},
    "RecognisesSectionsOfOurs": {RECOGNISES},
    "SaysTrue": {RECOGNISES},
    "RaisesYAMLError": {REFUSES},
    "MigratesAnything": {REFUSES},
    "DropsKeysSilently": {KEYS},
    "CountsLinesFromZero": {KEYS},
    "HasAVerdictOfItsOwn": {KEYS},
    "ReportsAnotherPlace": {FILE_HAS, OVERRIDES},
    "WritesTheTarget": {WRITES},
    "NumbersItsResults": {WRITES},
    "ReadsNoOverrides": {OVERRIDES},
    "TakesEveryOverride": {OVERRIDES},
    "ExplainsEverything": {EXPLAINS},
    "ExplainsByText": {EXPLAINS},
    "AlwaysHasANote": {NOTE},
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
