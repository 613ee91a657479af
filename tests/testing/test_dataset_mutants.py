"""The contract of datasets catches wrong datasets, each by the test that is about its mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from nxdt_testing.dataset_contract import DatasetContract

from tests.testing.mutants.dataset import MUTANTS, ByIndex, InOrder, OfRun, PadsOnTheRight
from tests.testing.outcomes import Outcomes, run_contract

FILE = Path(__file__).parent / "mutants/dataset.py"
RIGHT = (ByIndex.__name__, InOrder.__name__, PadsOnTheRight.__name__, OfRun.__name__)
CAUGHT_BY = {
    "InheritsNothing": "test_it_has_the_members_of_a_protocol",
    "GivesSmallIntegers": "test_samples_are_arrays_of_one_shape",
    "ForgetsAPosition": "test_samples_are_arrays_of_one_shape",
    "LearnsNothing": "test_labels_are_tokens_or_ignored",
    "IgnoresByAnotherNumber": "test_labels_are_tokens_or_ignored",
    "DoesNotShift": "test_a_label_is_the_token_that_follows",
    "LearnsAcrossDocuments": "test_nothing_is_learnt_across_documents_or_of_padding",
    "LearnsPadding": "test_nothing_is_learnt_across_documents_or_of_padding",
    "RepeatsPositions": "test_positions_rise_by_one_within_a_document",
    "CountsItsReads": "test_an_index_alone_decides_the_sample",
    "FingerprintsItself": "test_data_opened_twice_are_the_same",
    "ForgetsTheContent": "test_other_content_has_another_fingerprint",
    "ForgetsTheLength": "test_a_run_with_other_samples_has_another_fingerprint",
    "ForgetsTheSeed": "test_a_run_with_other_samples_has_another_fingerprint",
    "CountsFromTheEnd": "test_indices_end_at_the_length",
    "StandsBeforeItsSample": "test_a_stream_resumes_behind_any_sample",
    "ReadsAhead": "test_a_stream_resumes_behind_any_sample",
    "KeepsAnArray": "test_a_stream_resumes_behind_any_sample",
    "ForgetsItsState": "test_a_run_resumes_on_other_ranks_and_threads",
    "ForgetsThePass": "test_a_stream_resumes_behind_any_sample",
    "HandsOutItsState": "test_a_stream_resumes_behind_any_sample",
    "SeedsTheProcess": "test_reading_leaves_the_global_random_numbers_alone",
    "TakesItsOwnPart": "test_every_rank_reads_the_same",
    "BeginsAnew": "test_a_run_resumes_on_other_ranks_and_threads",
}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Of the right datasets under all tests, and of each mutant under the one that shall catch it."""
    return run_contract(FILE, RIGHT, CAUGHT_BY)


@pytest.mark.parametrize(("mutant", "test"), CAUGHT_BY.items())
def test_the_contract_catches(outcomes: Outcomes, mutant: str, test: str) -> None:
    assert (mutant, test) in outcomes.failed


def test_every_mutant_is_expected_to_be_caught() -> None:
    assert {mutant.__name__ for mutant in MUTANTS} == {*RIGHT, *CAUGHT_BY}


def test_right_datasets_pass_every_test(outcomes: Outcomes) -> None:
    assert not {(name, test) for name, test in outcomes.failed if name in RIGHT}
    passed = {test for name, test in outcomes.passed if name in RIGHT}
    assert passed == {name for name in vars(DatasetContract) if name.startswith("test_")}
