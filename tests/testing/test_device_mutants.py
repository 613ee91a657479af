"""The contract of device profiles fails a wrong one in the requirements that it breaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from nxdt_testing.device_contract import DeviceContract

from tests.testing.mutants.device import MUTANTS
from tests.testing.outcomes import Outcomes, every_third, requirements, run_mutants

FILE = Path(__file__).parent / "mutants/device.py"
OF_TYPE, NEEDS = "test_it_is_the_profile_of_its_device_type", "test_it_says_what_a_run_needs"
UNITS = "test_its_figures_have_the_units_of_their_fields"
DTYPES, PRODUCTS = "test_its_dtypes_are_named_as_in_torch", "test_its_tables_name_the_same_products"
HERE, ANSWER = "test_it_says_whether_this_machine_has_such_a_device", "test_its_operations_answer"
RESTORED = "test_its_generator_is_restored"
EVERY = {name for name in dir(DeviceContract) if name.startswith("test_")}
CAUGHT_BY = {
    "Right": set(),
    "IsOfAnotherType": {OF_TYPE},
    "HasNoBackend": {NEEDS},
    "SaysNothingOfInstalling": {NEEDS},
    "PeakInTeraflops": {UNITS},
    "MemoryInBytes": {UNITS},
    "LinksInGigabytes": {UNITS},
    "ShortNameOfADtype": {DTYPES},
    "ShortNameOfADtypeInBlocks": {DTYPES},
    "AnotherNameOfTheProduct": {PRODUCTS},
    "FailsWithoutADevice": {HERE, ANSWER, RESTORED},
    "SaysHowMany": {HERE},
    "CountsInGiB": {ANSWER},
    "KeepsItsState": {RESTORED},
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
    assert MUTANTS.keys() == CAUGHT_BY.keys()
