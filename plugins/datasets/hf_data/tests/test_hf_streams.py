"""Files in their order: the samples of the same rows in memory, and going on at any of them."""

from __future__ import annotations

import gzip
import json
from itertools import islice

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from nxdt_plugin_hf_data.errors import RowsDiffer, RowTooLong
from nxdt_testing.dataset_contract import take_steps
from nxdt_testing.errors import raises

from nxdt_core.errors.data import TooFewTokens
from nxdt_core.protocols.dataset import IterableDataset
from tests.sampling import takes_all


def parquet(path, columns):
    pq.write_table(pa.table(columns), path, row_group_size=3)


def arrow_stream(path, columns):
    table = pa.table(columns)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def arrow_file(path, columns):
    table = pa.table(columns)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def json_lines(path, columns):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    content = "\n\n".join(json.dumps(row) for row in rows).encode()
    path.write_bytes({".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)(content))


WRITERS = {
    ".parquet": parquet,
    "-stream.arrow": arrow_stream,
    "-file.arrow": arrow_file,
    ".jsonl": json_lines,
    ".jsonl.gz": json_lines,
    ".jsonl.zst": json_lines,
}


def write(directory, ending, columns, files=3):
    """The rows over several files, the last of which has the most."""
    directory.mkdir()
    size = len(next(iter(columns.values())))
    for number in range(files):
        part = slice(number * 7, (number + 1) * 7 if number < files - 1 else size)
        WRITERS[ending](directory / f"part-{number}{ending}", {name: rows[part] for name, rows in columns.items()})
    return directory


def one_pass(stream, contents):
    return [contents(sample) for sample in stream]


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize("kind", ["text", "input_ids", "labels"])
def test_a_stream_gives_the_samples_of_the_same_rows_in_memory(
    loader, saved, contents, tmp_path, documents, verses, ending, kind
):
    columns = {"text": verses} if kind == "text" else {"input_ids": documents}
    if kind == "labels":
        columns["labels"] = [[-100] * (len(ids) // 2) + ids[len(ids) // 2 :] for ids in documents]
    directory = write(tmp_path / "files", ending, columns)
    stream = loader(val_dir=directory, streaming=True).split("validation")
    memory = loader(val_dir=saved(tmp_path / "saved", **columns)).split("validation")
    assert isinstance(stream, IterableDataset)
    found = one_pass(stream, contents)
    assert found == [contents(memory[i]) for i in range(len(memory))]
    assert len(found) > 60


@pytest.mark.parametrize("kind", ["input_ids", "labels"])
@pytest.mark.parametrize("first", [0, 256, 300])
def test_lines_without_a_token_are_empty_documents(loader, contents, tmp_path, documents, kind, first):
    """JSON does not say of what type the values of an empty list would be."""
    rows = [[]] * first + documents + [[]] * 256
    columns = {"input_ids": rows, **({"labels": rows} if kind == "labels" else {})}
    json_lines(tmp_path / "a.jsonl", columns)
    json_lines(tmp_path / "b.jsonl", dict.fromkeys(columns, documents))
    found = (loader(val_dir=tmp_path / name, streaming=True).split("validation") for name in ("a.jsonl", "b.jsonl"))
    one, other = (one_pass(stream, contents) for stream in found)
    assert one == other


def test_a_directory_that_datasets_saved_is_a_stream_too(loader, contents, tmp_path, documents):
    splits = {name: datasets.Dataset.from_dict({"input_ids": documents}) for name in ("train", "validation")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "a", num_shards={"train": 3, "validation": 1})
    memory = loader(train_dir=tmp_path / "a").split("train")
    keys = {"streaming": True, "shuffle": False}
    for path in (tmp_path / "a", tmp_path / "a" / "train", tmp_path / "a" / "train" / "*.arrow"):
        stream = loader(train_dir=path, **keys).split("train")
        found = [contents(sample) for sample in islice(stream, len(memory))]
        assert found == [contents(memory[i]) for i in range(len(memory))]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("ending", WRITERS)
def test_a_stream_goes_on_at_any_sample(loader, contents, tmp_path, documents, ending, packing, pytestconfig):
    """Over two passes: each state is loaded into a stream that has read nothing."""
    short = [ids[:8] for ids in documents]
    directory = write(tmp_path / "files", ending, {"input_ids": documents if packing else short})

    def stream():
        return loader(train_dir=directory, streaming=True, packing=packing, shuffle=False).split("train")

    running, whole, states = stream(), [], []
    for sample in islice(running, 150):
        whole.append(contents(sample))
        states.append(json.loads(json.dumps(running.state_dict())))
    assert states[-1]["epoch"] >= 1
    for number in range(0, 140, 3 if takes_all(pytestconfig) else 11):
        resumed = stream()
        resumed.load_state_dict(states[number])
        assert [contents(sample) for sample in islice(resumed, 3)] == whole[number + 1 : number + 4]


def steps(dataset, count, rank=0, size=1, state=None, workers=0):
    """This rank's samples of each of ``count`` steps of 6, and the state behind them."""
    found, behind = take_steps(
        dataset, count, global_batch_size=6, seed=1, rank=rank, size=size, state=state, workers=workers
    )
    return [[batch.input_ids[0].tolist() for batch in step] for step in found], behind


def test_a_shuffled_stream_goes_on_at_another_number_of_ranks_with_prefetch(loader, tmp_path, verses):
    directory = write(tmp_path / "files", ".parquet", {"text": verses})

    def stream():
        return loader(train_dir=directory, streaming=True, shuffle_block=13).split("train")

    whole, _ = steps(stream(), 30)
    for stop in (1, 2, 13, 25):
        before = [steps(stream(), stop, rank, 2, workers=2)[0] for rank in range(2)]
        assert [first + second for first, second in zip(*before, strict=True)] == whole[:stop]
        _, state = steps(stream(), stop, 1, 2, workers=1)
        after = [steps(stream(), 30 - stop, rank, 3, state, workers=rank)[0] for rank in range(3)]
        assert [a + b + c for a, b, c in zip(*after, strict=True)] == whole[stop:]


def test_shuffling_keeps_the_samples_of_a_pass_and_changes_their_order(loader, contents, tmp_path, documents):
    """Rows of the length of a sample, so that passes have the same samples."""
    rows = [[number] * 8 for number in range(30)]
    directory = write(tmp_path / "files", ".parquet", {"input_ids": rows}, files=4)

    def passes(**keys):
        stream = loader(train_dir=directory, streaming=True, **keys).split("train")
        found = [int(sample.input_ids[0]) for sample in islice(stream, 60)]
        return found[:30], found[30:]

    assert passes(shuffle=False) == ([*range(30)], [*range(30)])
    first, second = passes(shuffle_block=5)
    assert sorted(first) == sorted(second) == [*range(30)]
    assert len({tuple(first), tuple(second), tuple(range(30)), tuple(passes(shuffle_block=5, seed=2)[0])}) == 4
    assert passes(shuffle_block=5)[0] == first
    whole_files = passes(shuffle_block=1)[0]  # blocks of one sample keep the order within a file
    assert whole_files != sorted(whole_files)
    assert [token for token in whole_files if token < 7] == [*range(7)]


@pytest.mark.parametrize(
    ("rows", "packing", "error", "words"),
    [
        ([[1] * 8] * 300 + [[2] * 5], None, RowsDiffer, r"Row 300 of .*part-0\.parquet has 5 tokens"),
        ([[1] * 8] * 300 + [[2] * 10], None, RowTooLong, r"Row 300 of .* has 10 tokens"),
        ([[1, 2], [3]], None, TooFewTokens, "train data has 3 tokens"),
    ],
)
def test_what_the_first_rows_do_not_show_is_told_when_it_is_read(loader, tmp_path, rows, packing, error, words):
    directory = write(tmp_path / "files", ".parquet", {"input_ids": rows}, files=1)
    stream = loader(train_dir=directory, streaming=True, packing=packing, shuffle=False).split("train")
    with raises(error, match=words):
        list(islice(stream, 400))


def test_the_fingerprint_knows_content_order_and_settings(loader, tmp_path, verses):
    one = write(tmp_path / "one", ".parquet", {"text": verses})
    two = write(tmp_path / "two", ".parquet", {"text": [verses[1], verses[0], *verses[2:]]})

    def fingerprint(path=one, **keys):
        return loader(train_dir=path, streaming=True, **keys).split("train").fingerprint()

    variants = [
        fingerprint(),
        fingerprint(two),
        fingerprint(seq_length=9),
        fingerprint(seed=2),
        fingerprint(shuffle=False),
        fingerprint(shuffle_block=3),
        fingerprint(add_bos=True),
        fingerprint(packing=False, seq_length=2000),
        fingerprint(reset_position_ids=False),
    ]
    assert len(set(variants)) == len(variants)
    assert fingerprint() == variants[0]
