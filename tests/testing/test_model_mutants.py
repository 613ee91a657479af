"""The contract of models catches wrong models, each by the test that is about its mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sampling import takes_all
from tests.testing.mutants.model import MUTANTS
from tests.testing.mutants.small_model import SmallBuilder
from tests.testing.outcomes import Outcomes, asked, every_third, run_contract

FILE = Path(__file__).parent / "mutants/model.py"
RIGHT = SmallBuilder.__name__
LAYOUT = "test_it_trains_in_a_layout_as_in_one_process"
CAUGHT_BY = {
    "InheritsNothing": "test_it_has_the_members_of_the_protocol",
    "LeavesMeta": "test_it_is_built_on_meta_and_is_then_the_same",
    "ForgetsItsTable": "test_it_is_built_on_meta_and_is_then_the_same",
    "SeedsBeforeItIsBuilt": "test_it_is_built_on_meta_and_is_then_the_same",
    "HasNoRuleForBiases": "test_fresh_weights_follow_from_names_and_the_seed",
    "DrawsAllAlike": "test_fresh_weights_follow_from_names_and_the_seed",
    "SaysFewerRows": "test_logits_have_a_row_of_the_vocabulary_for_each_token",
    "HasAnIdlePart": "test_a_loss_reaches_every_parameter",
    "LooksAhead": "test_no_token_sees_a_later_one",
    "IgnoresDocuments": "test_documents_do_not_see_one_another",
    "KeepsItsFirstMask": "test_packed_documents_equal_documents_alone",
    "RoundsItsLogits": "test_it_computes_in_the_dtype_of_its_weights",
    "WidensItsLogits": "test_it_computes_in_the_dtype_of_its_weights",
    "CentresItsRows": "test_rows_of_a_batch_do_not_see_one_another",
    "CountsPlacesFromOne": "test_positions_default_to_the_place_in_the_row",
    "AddsItsInputWhenTraining": "test_it_computes_the_same_in_training_and_evaluation",
    "CountsItsCalls": "test_recomputation_changes_nothing",
    "DrawsItsLastNorm": "test_every_pattern_matches_something",
    "HasARuleForNothing": "test_every_pattern_matches_something",
    "NamesNothing": "test_every_pattern_matches_something",
    "NamesNoParameter": "test_every_pattern_matches_something",
    "PlansTwice": "test_each_matrix_is_planned_once",
    "ForgetsAMatrix": "test_each_matrix_is_planned_once",
    "LetsNormsDecay": "test_vectors_do_not_decay_unless_asked",
    "LetsBiasesDecay": "test_vectors_do_not_decay_unless_asked",
    "TiesWhatIsNotOne": "test_parameters_that_are_one_are_named_as_tied",
    "TiesInSilence": "test_parameters_that_are_one_are_named_as_tied",
    "HasNoSuchHeads": "test_heads_divide_the_projections",
    "ForgetsAFirstPart": "test_stages_have_the_names_and_weights_of_the_whole",
    "TravelsWider": "test_stages_in_turn_compute_what_the_whole_does",
    "KnowsOnlyTheWhole": "test_stages_in_turn_compute_what_the_whole_does",
    "SwapsColumnAndRow": f"{LAYOUT}[tp]",
    "ShardsWithoutABlock": f"{LAYOUT}[tp]",
    "HasItsResidualInABlock": f"{LAYOUT}[tp]",
    "CountsAllHeadsOnAShard": f"{LAYOUT}[tp]",
    "TakesSlopesOfTheFirstHeads": f"{LAYOUT}[tp]",
    "ForgetsTheStyleOfAnEmbedding": f"{LAYOUT}[tp-sp]",
    "KeepsItsCoreToItself": f"{LAYOUT}[cp]",
    "DeclaresWhatItsPlanLacks": "test_the_plan_has_what_the_record_declares",
    "CountsWhatIsLookedUp": "test_operations_follow_from_the_weights",
    "ForgetsTheHead": "test_operations_follow_from_the_weights",
    "GivesTwoOneName": "test_a_directory_has_every_parameter_once_and_comes_back",
    "HasNoNameForTheHead": "test_a_directory_has_every_parameter_once_and_comes_back",
    "NamesAnotherArchitecture": "test_its_config_json_names_an_architecture_that_it_reads",
    "CannotBeRead": "test_its_config_json_is_read_back",
    "ForgetsAValueOnReading": "test_its_config_json_is_read_back",
    "ForgetsAValueOnWriting": "test_its_config_json_is_read_back",
    "ReadsKeysThatItDoesNotHave": "test_its_config_json_is_read_back",
}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    """Of the right model under the tests that catch one, or under all of all samples; of each mutant under its own."""
    mutants = asked(request, CAUGHT_BY)
    if takes_all(request.config):
        return run_contract(FILE, [RIGHT], mutants)
    return run_contract(FILE, [], [*((RIGHT, test) for test in dict.fromkeys(CAUGHT_BY.values())), *mutants.items()])


ON_RANKS = ("HasItsResidualInABlock", "TakesSlopesOfTheFirstHeads")
"""Mutants that two ranks must train for; ``SwapsColumnAndRow`` is caught by the same test."""


@pytest.mark.parametrize(("mutant", "test"), every_third(CAUGHT_BY.items(), slow=ON_RANKS))
def test_the_contract_catches(outcomes: Outcomes, mutant: str, test: str) -> None:
    assert (mutant, test) in outcomes.failed


def test_every_mutant_is_expected_to_be_caught() -> None:
    assert {mutant.mutant for mutant in MUTANTS} == {RIGHT, *CAUGHT_BY}


def test_the_right_model_passes_every_test_that_catches_one(outcomes: Outcomes) -> None:
    assert {(RIGHT, test) for test in CAUGHT_BY.values()} <= outcomes.passed
    assert not {test for name, test in outcomes.failed if name == RIGHT}
