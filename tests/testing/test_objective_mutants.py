"""The contract of objectives fails a wrong one in the requirements that it breaks, and in no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.mutants.objective import MUTANTS
from tests.testing.outcomes import CaughtBy, Outcomes, assert_fails_where_wrong, every_third, run_mutants, without

FILE = Path(__file__).parent / "mutants/objective.py"
MEMBERS = "test_it_has_the_members_of_the_protocol"
KNOWN, PARTS = "test_the_weight_is_known_before_the_forward_pass", "test_micro_batches_add_up_to_the_batch"
BLANK, PACKED = "test_a_blank_sample_weighs_nothing", "test_packed_documents_count_as_padded_ones"
WEIGHTS = "test_loss_weights_scale_the_loss"
NARROW = "test_a_loss_of_narrow_logits_is_computed_in_float32"
TP, CP, ZERO3 = (f"test_layouts_agree[{layout}]" for layout in ("tp", "cp", "zero3"))
CAUGHT_BY = {
    "Right": set(),
    "InheritsNothing": {MEMBERS},
    "DividesByItsWeight": {PARTS},
    "CountsRowsBefore": {KNOWN, TP, CP, ZERO3},
    "LearnsTheLastToken": {"test_ignored_labels_do_not_count"},
    "CountsBlankRows": {BLANK},
    "TakesARowForADocument": {PACKED},
    "KeepsTheGraph": {"test_metrics_are_detached_sums"},
    "AveragesItsMetric": {PARTS, BLANK, PACKED},
    "SumsInTheDtypeOfTheLogits": {NARROW},
    "TakesTheLogOfAProbability": {"test_its_gradient_is_finite"},
    "TakesTheWholeVocabulary": {TP},
    "AddsNoShardsUp": {CP},
    "ReportsTheWholeOnEachRank": {CP},
    "KeepsTheFirstWeight": {KNOWN},
    "ForgetsTheWeights": {WEIGHTS},
    "TakesWeightsForAMask": {WEIGHTS},
    "WritesIntoItsBatch": {PARTS, "test_ignored_labels_do_not_count", NARROW, CP, ZERO3},
}


@pytest.fixture(scope="module")
def caught_by(request: pytest.FixtureRequest) -> CaughtBy:
    """``CAUGHT_BY``, by default with one layout: the same test compares all of them."""
    return without({TP, ZERO3}, CAUGHT_BY, request)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, caught_by: CaughtBy) -> Outcomes:
    """How the tests of the file ended."""
    return run_mutants(FILE, caught_by, request)


@pytest.mark.parametrize("mutant", every_third(CAUGHT_BY))
def test_the_contract_fails_a_mutant_where_it_is_wrong(
    outcomes: Outcomes, mutant: str, caught_by: CaughtBy, pytestconfig: pytest.Config
) -> None:
    assert_fails_where_wrong(outcomes, mutant, caught_by, pytestconfig)


def test_every_mutant_is_expected() -> None:
    assert {mutant.__name__ for mutant in MUTANTS} == CAUGHT_BY.keys()
