"""Which files of a directory a stream takes, and which a pattern names."""

from __future__ import annotations

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nxdt_plugin_hf_data.formats import files_of

from nxdt_core.errors import NxdtError

HUB = ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001", "test-00000-of-00001")


def made(directory, *names, ending=".parquet"):
    """Files that nobody reads."""
    for name in names:
        path = directory / f"{name}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return directory


def taken(path, directory, split="train"):
    return [str(file.relative_to(directory).with_suffix("")) for file in files_of(path, "data.train_dir", split)]


def refused(path, split, code, *words):
    with pytest.raises(NxdtError) as caught:
        files_of(path, "data.val_dir", split)
    assert (caught.value.code, caught.value.exit_status) == (code, 2)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("names", "train", "validation", "test"),
    [
        (HUB, HUB[:2], HUB[2:3], HUB[3:]),
        (
            [f"data/{name}" for name in HUB],
            ["data/" + name for name in HUB[:2]],
            ["data/" + HUB[2]],
            ["data/" + HUB[3]],
        ),
        (("my_training.1", "my.dev", "my eval 1"), ["my_training.1"], ["my.dev"], ["my eval 1"]),
        (("a/train/0", "a/val/0", "a/test/0"), ["a/train/0"], ["a/val/0"], ["a/test/0"]),
        (("train/0-test", "valid-1/0", "1.testing/0"), ["train/0-test"], ["valid-1/0"], ["1.testing/0"]),
        (("train/0", "evaluation", "dev"), ["train/0"], ["dev"], ["evaluation"]),
        (("0", "latest", "devices", "b/trains"), *[["0", "b/trains", "devices", "latest"]] * 3),
    ],
)
def test_each_split_has_the_files_whose_names_say_it(tmp_path, names, train, validation, test):
    made(tmp_path / "train-val-test", *names)
    for split, expected in (("train", train), ("validation", validation), ("test", test)):
        assert taken(tmp_path / "train-val-test", tmp_path / "train-val-test", split) == list(expected)


@pytest.mark.parametrize("names", [HUB, ("data/train/0", "data/dev/0", "data/test/0"), ("en/train_1", "en/val.2")])
def test_the_splits_are_those_that_the_library_finds(tmp_path, names):
    made(tmp_path, *names)
    patterns = datasets.data_files.get_data_patterns(str(tmp_path))
    for split, found in datasets.data_files.DataFilesDict.from_patterns(patterns, str(tmp_path)).items():
        assert sorted(found) == [str(file) for file in files_of(tmp_path, "data.train_dir", str(split))]


def test_a_directory_that_names_one_split_gives_all_of_its_files_for_it(tmp_path):
    made(tmp_path, "books", "web-train")
    assert taken(tmp_path, tmp_path) == ["books", "web-train"]


def test_a_split_of_which_no_name_speaks_is_refused_with_those_that_there_are(tmp_path):
    made(tmp_path, *HUB[:2], HUB[3])
    refused(tmp_path, "validation", "NXDT-D202", "data.val_dir", "'test', 'train'", "'validation'", str(tmp_path / "*"))
    assert len(taken(tmp_path / "*", tmp_path, "validation")) == 3


@pytest.mark.parametrize(("name", "said"), [("books", "none"), ("train-test", "'test', 'train'")])
def test_a_file_of_no_or_several_splits_beside_those_of_others_is_refused(tmp_path, name, said):
    made(tmp_path, *HUB, name)
    refused(tmp_path, "train", "NXDT-D217", str(tmp_path / f"{name}.parquet"), said)


def test_what_is_hidden_and_what_the_library_computed_is_no_data(tmp_path):
    made(tmp_path, "a", ".b", ".cache/c", ending=".arrow")
    made(tmp_path, "cache-0123", "in/cache-4", "cache-x.val", ending=".arrow")
    made(tmp_path, "cache-a", ending=".parquet")
    assert taken(tmp_path, tmp_path) == ["a", "cache-a"]
    assert taken(tmp_path / "*.arrow", tmp_path) == ["a"]
    assert taken(tmp_path / "cache-0*.arrow", tmp_path) == ["cache-0123"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*/train-*.parquet", ["a/train-0", "b/train-1"]),
        ("**/*.parquet", ["a/train-0", "b/c/test-2", "b/train-1", "x"]),
        ("**/c/*", ["b/c/test-2"]),
        ("?/*", ["a/train-0", "b/train-1"]),
        ("x.parquet", ["x"]),
    ],
)
def test_patterns_work_in_every_part_of_a_path_and_name_files(tmp_path, pattern, expected):
    made(tmp_path, "a/train-0", "b/train-1", "b/c/test-2", "x")
    assert taken(tmp_path / pattern, tmp_path) == expected


def test_a_pattern_that_no_file_matches_is_refused(tmp_path):
    made(tmp_path, "a/b/0")
    refused(tmp_path / "*" / "b", "train", "NXDT-D001", "data.val_dir")


def test_a_run_trains_on_the_files_of_its_split(loader, tmp_path):
    """Each file's token says whose it is."""
    for token, name in enumerate(("train", "validation", "test")):
        pq.write_table(pa.table({"input_ids": [[token] * 8] * 4}), tmp_path / f"{name}-00000-of-00001.parquet")
    data = loader(train_dir=tmp_path, val_dir=tmp_path, test_dir=tmp_path, streaming=True)
    for token, name in enumerate(("train", "validation", "test")):
        found = [int(sample.input_ids[0]) for _, sample in zip(range(4), data.split(name), strict=False)]
        assert found == [token] * 4
