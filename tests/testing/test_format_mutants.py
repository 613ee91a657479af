"""The contract of checkpoint formats catches wrong formats, each by the test that is about its mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from nxdt_testing.format_contract import FormatContract

from tests.testing.mutants.format import MUTANTS, Acme
from tests.testing.outcomes import Outcomes, run_contract

FILE = Path(__file__).parent / "mutants/format.py"
RIGHT = (Acme.__name__,)
CAUGHT_BY = {
    "HasNoStep": "test_it_has_the_members_of_the_protocol",
    "RecognisesAll": "test_it_recognises_its_own_checkpoints_alone",
    "LooksInside": "test_it_recognises_by_names_alone",
    "DescribesSections": "test_model_config_gives_dotted_keys_or_nothing",
    "KeepsItsNames": "test_every_parameter_is_listed_once_and_whole",
    "ListsParts": "test_every_parameter_is_listed_once_and_whole",
    "NumbersItsState": "test_optimizer_state_is_of_parameters",
    "ListsStateWithTheWeights": "test_weights_can_be_listed_alone",
    "ReadsInItsOwnOrder": "test_tensors_are_what_was_listed",
    "ConvertsOnTheWay": "test_tensors_are_what_was_listed",
    "ReadsFromTheBeginning": "test_a_share_of_the_tensors_is_what_all_of_them_are",
    "ReadsNothing": "test_the_model_takes_the_weights",
}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Of the right format under all tests, and of each mutant under the one that must catch it."""
    return run_contract(FILE, RIGHT, CAUGHT_BY)


@pytest.mark.parametrize(("mutant", "test"), CAUGHT_BY.items())
def test_the_contract_catches(outcomes: Outcomes, mutant: str, test: str) -> None:
    assert (mutant, test) in outcomes.failed


def test_every_mutant_is_expected_to_be_caught() -> None:
    assert {mutant.__name__ for mutant in MUTANTS} == {*RIGHT, *CAUGHT_BY}


def test_a_right_format_passes_every_test(outcomes: Outcomes) -> None:
    assert not {(name, test) for name, test in outcomes.failed if name in RIGHT}
    passed = {test for name, test in outcomes.passed if name in RIGHT}
    assert passed == {name for name in vars(FormatContract) if name.startswith("test_")}
