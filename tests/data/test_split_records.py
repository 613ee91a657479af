"""The share of the training records that validates: the same in every run, without overlap, and named by a digest."""

from __future__ import annotations

import json

import pytest
from nxdt_testing.errors import raises

from nxdt_core.data.files.paths import RecordFiles
from nxdt_core.data.files.splits import SplitRecords
from nxdt_core.errors import NxdtError

Nothing = NxdtError.define("TEST-1", "Nothing.", "{fraction} of {records} leaves none to {split}.", "Add some.")


@pytest.fixture
def splits(tmp_path):
    """``splits(**keys)``: of a file with twenty records to train on, and of another one to test on."""
    for name, count in (("train", 20), ("test", 3)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"number": each}) + "\n" for each in range(count)))

    def made(limit_in_digests=False, empty=None, **keys):
        files = {f"{name}_files": (tmp_path / f"{name}.jsonl",) for name in ("train", "test")}
        config = RecordFiles(**files, **keys)
        return SplitRecords(config, example="{}", empty=empty, limit_in_digests=limit_in_digests)

    return made


def numbers(chosen):
    return [record["number"] for _, record in chosen[0]]


def test_a_share_of_the_training_records_validates_and_the_others_train(splits):
    found = splits(validation_fraction=0.25, split_seed=3)
    training, validating = numbers(found.of("train")), numbers(found.of("validation"))
    assert (len(training), len(validating)) == (15, 5)
    assert sorted(training + validating) == [*range(20)]
    assert (training, validating) == (sorted(training), sorted(validating))
    assert numbers(splits(validation_fraction=0.25, split_seed=4).of("validation")) != validating
    assert numbers(found.of("test")) == [0, 1, 2]


def test_without_a_share_and_files_there_is_no_split(splits):
    assert splits().of("validation") is None
    assert numbers(splits(dev_choose_samples=4).of("train")) == [0, 1, 2, 3]


@pytest.mark.parametrize("limit_in_digests", [False, True])
def test_digests_tell_divisions_apart(splits, limit_in_digests):
    keys = [{"validation_fraction": 0.25}, {"validation_fraction": 0.25, "split_seed": 1}, {"validation_fraction": 0.5}]
    keys += [{"validation_fraction": 0.25, "dev_choose_samples": 16}]
    digests = [splits(limit_in_digests, **each).of(name)[1] for each in keys for name in ("train", "validation")]
    assert len({*digests}) == len(digests)
    assert splits(limit_in_digests, **keys[0]).of("train")[1] == digests[0]


@pytest.mark.parametrize(("share", "split"), [(0.01, "validation"), (0.99, "train")])
def test_a_side_without_records_is_the_error_of_the_loader(splits, share, split):
    with raises(Nothing, match=f"{share} of 20 leaves none to {split}"):
        splits(empty=Nothing, validation_fraction=share).of("train")
    assert splits(validation_fraction=share).of("train") is not None
