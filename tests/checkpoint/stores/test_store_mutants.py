"""The contract of stores catches wrong stores, each by the test that is about its mistake."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.sampling import takes_all

CAUGHT_BY = {
    "ShowsUnfinished": "test_an_object_shows_only_when_its_writing_has_ended",
    "RemembersItsListing": "test_checkpoints_live_in_it",
    "CommitsAfterAnException": "test_an_exception_while_writing_leaves_nothing",
    "SwallowsTheException": "test_an_exception_while_writing_leaves_nothing",
    "LosesAFullLastPart": "test_objects_of_several_parts_come_back",
    "ReadsToTheEndOfAPart": "test_objects_of_several_parts_come_back",
    "KeepsWholePartsAfterAnException": "test_an_interruption_between_any_two_writes_leaves_nothing",
    "CommitsWhenInterrupted": "test_an_interruption_between_any_two_writes_leaves_nothing",
    "Appends": "test_writing_replaces_the_whole_object",
    "IgnoresLength": "test_ranges_are_exact",
    "InclusiveRange": "test_ranges_are_exact",
    "EmptyLengthIsAll": "test_ranges_are_exact",
    "RaisesKeyErrorWhereMissing": "test_missing_objects_are_missing",
    "StatRaisesWhereMissing": "test_missing_objects_are_missing",
    "ListsInOrderOfWriting": "test_listing_is_sorted_by_key_and_prefixes_are_plain_text",
    "ListsAsAWalkWould": "test_listing_is_sorted_by_key_and_prefixes_are_plain_text",
    "PrefixIsADirectory": "test_listing_is_sorted_by_key_and_prefixes_are_plain_text",
    "ListsOnePage": "test_long_listings_are_complete",
    "SortsEachPage": "test_long_listings_are_complete",
    "DecodesKeys": "test_unusual_names_are_names",
    "DeletesOneRequest": "test_deleting",
    "DeletingTheMissingFails": "test_deleting",
    "PutOverwrites": "test_put_if_absent_creates_once",
    "PutChecksThenActs": "test_put_if_absent_has_one_winner",
    "MatchOverwrites": "test_put_if_match_replaces_what_is_expected_only",
    "MatchCreates": "test_put_if_match_replaces_what_is_expected_only",
    "MatchComparesLengths": "test_put_if_match_replaces_what_is_expected_only",
    "MatchChecksThenActs": "test_put_if_match_has_one_winner",
    "TakesAnyKey": "test_keys_that_leave_the_root_are_refused",
    "ForgetsOnReopening": "test_bytes_come_back",
    "LocksInOneProcess": "test_ranks_write_and_compete_at_once",
    "MixesConcurrentWriters": "test_concurrent_writers_of_one_key_leave_one_whole_object",
}


class _Failures:
    """Pytest plugin that notes which tests of which class fail."""

    def __init__(self) -> None:
        self.by_class: dict[str, set[str]] = defaultdict(set)
        self.classes: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _, class_name, test = report.nodeid.split("::", 2)
        self.classes.add(class_name)
        if report.failed:
            self.by_class[class_name].add(test.split("[")[0])


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> _Failures:
    """What the contract says of each store: all of it under ``--samples=all``, else the test that catches a mutant."""
    plugin = _Failures()
    file = str(Path(__file__).with_name("store_mutants.py"))
    catching = [f"{file}::Test{mutant}::{test}" for mutant, test in CAUGHT_BY.items()]
    paths = [file] if takes_all(request.config) else [*catching, f"{file}::TestMemoryStorage"]
    options = ["-q", "--no-header", "--tb=no", "--show-capture=no", "-r", "", "-p", "no:cacheprovider"]
    pytest.main([*paths, *options], plugins=[plugin])
    return plugin


@pytest.mark.parametrize(("mutant", "test"), CAUGHT_BY.items())
def test_the_contract_catches(failures: _Failures, mutant: str, test: str) -> None:
    assert test in failures.by_class[f"Test{mutant}"]


def test_every_mutant_is_expected_to_be_caught_and_the_right_store_is_not(failures: _Failures) -> None:
    assert failures.classes == {f"Test{name}" for name in (*CAUGHT_BY, "MemoryStorage")}
    assert not failures.by_class["TestMemoryStorage"]
