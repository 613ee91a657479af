"""The contract of plugins fails a wrong one in the requirements that it breaks, and in no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.mutants.plugin import MUTANTS
from tests.testing.outcomes import Outcomes, assert_fails_where_wrong, every_third, run_mutants

FILE = Path(__file__).parent / "mutants/plugin.py"
USABLE, ELSE = "test_it_is_usable", "test_its_entry_module_changes_nothing_else"
LIGHT, DOCUMENTED = "test_its_entry_module_is_light", "test_every_section_is_documented"
COMES_BACK, SCHEMA = "test_every_section_comes_back_from_a_file", "test_every_section_has_a_json_schema"
READ = "test_every_key_is_read"
CAUGHT_BY = {
    "Right": set(),
    "Raises": {USABLE},
    "ImportsNumpy": {ELSE, LIGHT},
    "ComputesAtImport": {LIGHT},
    "HasADefaultOfAnotherType": {COMES_BACK},
    "HasATypeThatYAMLHasNot": {COMES_BACK, SCHEMA},
    "HasNoHook": {ELSE},
    "RequiresNoRange": {ELSE},
    "TakesTheFirstOfASet": {"test_every_process_finds_the_same"},
    "NamesAMissingTarget": {"test_every_target_can_be_imported"},
    "LeavesAKeyWithoutText": {DOCUMENTED},
    "ReadsEveryKeyAtOnce": set(),
    "ReadsNoKey": {READ},
    "SaysNothingOfItsComponent": {"test_every_record_has_a_summary"},
    "HasAWrongRecipe": {"test_its_recipes_are_right"},
    "IsNotTyped": {"test_it_is_typed"},
    "DoesNotSayHowToInstall": {"test_its_readme_says_how_to_install_it"},
}
SKIPS = {"Raises": {LIGHT}}
"""What cannot be measured of a mutant."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    """Of the right one under all tests, and of each mutant under those that it fails, or under all of all samples."""
    return run_mutants(FILE, CAUGHT_BY, request)


@pytest.mark.parametrize("mutant", every_third(CAUGHT_BY))
def test_the_contract_fails_a_mutant_where_it_is_wrong(
    outcomes: Outcomes, mutant: str, pytestconfig: pytest.Config
) -> None:
    assert_fails_where_wrong(outcomes, mutant, CAUGHT_BY, pytestconfig, SKIPS.get(mutant, set()))


def test_every_mutant_is_expected() -> None:
    assert MUTANTS.keys() == CAUGHT_BY.keys()
