"""The contract of launchers fails a wrong one in the requirements that it breaks, and in no others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from nxdt_testing.launcher_contract import LauncherContract

from tests.sampling import takes_all
from tests.testing.mutants.launcher import MUTANTS
from tests.testing.outcomes import Outcomes, run_contract

FILE = Path(__file__).parent / "mutants/launcher.py"
RANK, MEET = "test_every_process_has_its_rank", "test_all_processes_meet_at_one_address"
WRONG, SAME = "test_wrong_and_missing_variables_are_errors", "test_joining_changes_nothing"
FILES, ARGUMENTS = "test_a_submission_has_files_and_a_command", "test_the_files_of_a_job_train_with_all_its_arguments"
AGAIN = "test_a_job_has_the_same_files_again"
CAUGHT_BY = {
    "Right": set(),
    "RightAndOnlyJoins": set(),
    "ImportsNumpy": {"test_its_modules_import_nothing_heavy"},
    "InheritsNothing": {"test_it_is_a_launcher"},
    "JoinsEveryProcess": {"test_a_process_that_it_did_not_start_does_not_join"},
    "CountsFromOne": {RANK},
    "KnowsOneDevice": {RANK},
    "MeetsOnItsOwnHost": {MEET},
    "MeetsWhereverItRuns": {MEET},
    "MeetsOnLoopback": {MEET},
    "DerivesNoPort": {MEET},
    "RaisesKeyError": {WRONG},
    "ReadsNonsenseAsInt": {WRONG},
    "WritesVariables": {SAME},
    "CountsItsCalls": {SAME},
    "NamesFilesAbsolutely": {FILES},
    "ReturnsOneWord": {FILES},
    "QuotesNothing": {ARGUMENTS},
    "ForgetsOverrides": {ARGUMENTS},
    "CompilesNothing": {ARGUMENTS},
    "AsksForOneNode": {"test_the_files_of_a_job_follow_its_nodes"},
    "NamesByTime": {AGAIN},
    "WritesItsFiles": {"test_a_submission_writes_and_starts_nothing"},
    "AsksItsScheduler": {"test_a_submission_writes_and_starts_nothing"},
    "IsNotAskedByItsJobs": {"test_the_files_of_a_job_name_the_launcher"},
}


RIGHT = [name for name, broken in CAUGHT_BY.items() if not broken]


@pytest.fixture(scope="module")
def outcomes(pytestconfig: pytest.Config) -> Outcomes:
    """How the tests of the file ended."""
    if takes_all(pytestconfig):
        return run_contract(FILE, CAUGHT_BY, {})
    return run_contract(FILE, RIGHT, [(name, test) for name, broken in CAUGHT_BY.items() for test in broken])


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_the_contract_fails_a_mutant_where_it_is_wrong(outcomes: Outcomes, mutant: str) -> None:
    assert {test for name, test in outcomes.failed if name == mutant} == CAUGHT_BY[mutant]


def test_every_requirement_is_met_by_a_right_one_and_broken_by_a_mutant(outcomes: Outcomes) -> None:
    requirements = {name for name in dir(LauncherContract) if name.startswith("test_")}
    assert {test for name, test in outcomes.passed if name in RIGHT} == requirements
    assert set().union(*CAUGHT_BY.values()) == requirements


def test_a_launcher_that_writes_variables_leaves_none_to_later_tests() -> None:
    before = os.environ.keys() - {"PYTEST_CURRENT_TEST"}
    ended = run_contract(FILE, [], [("WritesVariables", RANK)])
    assert (ended.passed, ended.failed) == ({("WritesVariables", RANK)}, set())
    assert os.environ.keys() - {"PYTEST_CURRENT_TEST"} == before


def test_every_mutant_is_expected() -> None:
    assert {mutant.__name__ for mutant in MUTANTS} == CAUGHT_BY.keys()
