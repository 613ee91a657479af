"""What can be wrong in a section and in a dataset: each is told with a code, its place, and what to do."""

from __future__ import annotations

import gzip
import json
import os
from itertools import islice

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from nxdt_plugin_hf_data import formats
from nxdt_plugin_hf_data.config import HfDataConfig, SourceConfig
from nxdt_plugin_hf_data.errors import DamagedDataset
from nxdt_plugin_hf_data.formats import read_rows
from nxdt_testing.errors import raises

from nxdt_core.data.files.records import read_records
from nxdt_core.errors import NxdtError
from nxdt_core.errors.data import ArrowUnreadable, DataFileChanged, TooFewTokens

GOOD = [[*range(8)]] * 40


def read(split):
    dataset = split()
    if not hasattr(dataset, "__len__"):
        list(islice(dataset, 5000))


def refused(split, code, *words):
    with pytest.raises(NxdtError) as caught:
        read(split)
    message = str(caught.value)
    assert caught.value.code == code, message
    assert caught.value.exit_status == 2
    for word in words:
        assert word in message
    return message


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({}, "train_dir"),
        ({"train_dir": "a", "sources": {"x": {"train_dir": "b"}}}, "train_dir"),
        ({"sources": {"x": {}}}, "sources.x"),
        ({"sources": {"x": {"train_dir": "a", "weight": 0.0}}}, "sources.x.weight"),
        ({"sources": {"x": {"train_dir": "a", "weight": 1e-9}, "y": {"train_dir": "b"}}}, "sources.x.weight"),
        ({"train_dir": "a", "eod_mask_loss": True, "add_eos": False}, "eod_mask_loss"),
    ],
)
def test_sections_that_cannot_work_are_refused_by_key(keys, key):
    if "sources" in keys:
        keys = {**keys, "sources": {name: SourceConfig(**source) for name, source in keys["sources"].items()}}
    assert [found for found, _ in HfDataConfig(**keys).check()] == [key]


def test_a_small_weight_is_held_to_those_of_what_is_trained_on():
    sources = {"x": SourceConfig(train_dir="a", weight=1e-5), "y": SourceConfig(val_dir="b", weight=9.0)}
    assert not [*HfDataConfig(sources=sources).check()]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_path_that_is_not_there_is_named_with_what_lies_beside_it(loader, saved, tmp_path, streaming):
    saved(tmp_path / "corpus", GOOD)
    made = loader(train_dir=tmp_path / "corpsu", streaming=streaming)
    refused(lambda: made.split("train"), "NXDT-D001", "data.train_dir", "corpsu", str(tmp_path / "corpus"))


def test_the_key_of_a_source_names_it(loader, tmp_path):
    made = loader(sources={"web": {"val_dir": tmp_path / "no"}})
    refused(lambda: made.split("validation"), "NXDT-D001", "data.sources.web.val_dir")


def test_a_directory_that_is_no_dataset_is_refused_with_what_it_holds(loader, saved, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(lambda: loader(train_dir=tmp_path / "empty").split("train"), "NXDT-D200", "it is empty", "save_to_disk")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    refused(lambda: loader(train_dir=tmp_path / "notes").split("train"), "NXDT-D200", "it holds a.txt")
    saved(tmp_path / "around" / "inner", GOOD)
    refused(lambda: loader(train_dir=tmp_path / "around").split("train"), "NXDT-D200", str(tmp_path / "around/inner"))


@pytest.mark.parametrize("whole", [False, True])
def test_files_that_only_streams_read_say_so(loader, tmp_path, whole):
    pq.write_table(pa.table({"input_ids": GOOD}), tmp_path / "a.parquet")
    path = tmp_path / "a.parquet" if whole else tmp_path
    refused(lambda: loader(train_dir=path).split("train"), "NXDT-D200", "data.streaming")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_split_that_is_not_there_is_refused_with_those_that_are(loader, tmp_path, streaming):
    parts = {name: datasets.Dataset.from_dict({"input_ids": GOOD}) for name in ("train", "dev")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "a")
    made = loader(val_dir=tmp_path / "a", streaming=streaming)
    refused(lambda: made.split("validation"), "NXDT-D202", "'validation'", "'dev'", "data.val_dir")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_without_rows_is_refused(loader, saved, tmp_path, streaming):
    table = pa.table({"input_ids": pa.array([], pa.list_(pa.int64()))})
    datasets.Dataset(table).save_to_disk(tmp_path / "a")
    refused(lambda: loader(train_dir=tmp_path / "a", streaming=streaming).split("train"), "NXDT-D214", "data.train_dir")


@pytest.mark.parametrize("streaming", [False, True])
def test_missing_columns_are_refused_with_those_that_are_there(loader, saved, tmp_path, streaming):
    path = saved(tmp_path / "a", content=["x"], ids=[1])
    made = loader(train_dir=path, streaming=streaming)
    refused(lambda: made.split("train"), "NXDT-D203", "'input_ids'", "'text'", "'content', 'ids'", "data.text_key")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"input_ids": [[0.5] * 8]}, ("'input_ids'", "double")),
        ({"input_ids": [7, 8, 9]}, ("'input_ids'", "int32")),
        ({"input_ids": ["a b"]}, ("'input_ids'", "string")),
        ({"input_ids": GOOD, "labels": [[True] * 8] * 40}, ("'labels'", "bool")),
        ({"text": [3, 4]}, ("'text'", "int64", "it must be text")),
    ],
)
def test_columns_of_another_type_are_refused_with_both(loader, saved, tmp_path, streaming, columns, words):
    made = loader(train_dir=saved(tmp_path / "a", **columns), streaming=streaming)
    refused(lambda: made.split("train"), "NXDT-D204", *words)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"input_ids": [*GOOD, None, *GOOD]}, ("'input_ids'", "row 40")),
        ({"input_ids": [*GOOD, [1, None, 3, 4, 5, 6, 7, 8]]}, ("'input_ids'", "row 40")),
        ({"text": ["a", "b", None]}, ("'text'", "row 2")),
    ],
)
def test_missing_values_are_refused_with_their_row(loader, saved, tmp_path, streaming, columns, words):
    made = loader(train_dir=saved(tmp_path / "a", **columns), streaming=streaming, shuffle=False)
    refused(lambda: made.split("train"), "NXDT-D205", *words)


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_that_disagree_are_refused_with_their_row(loader, saved, tmp_path, streaming):
    labels = [*GOOD[:-1], [1, 2]]
    made = loader(train_dir=saved(tmp_path / "a", GOOD, labels=labels), streaming=streaming)
    refused(lambda: made.split("train"), "NXDT-D206", "Row 39", "8 input_ids and 2 labels")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("token", "where"), [(272, slice(0, 1)), (-1, slice(0, 1)), (5_000, slice(38, 40))])
@pytest.mark.parametrize("packing", [True, False])
def test_tokens_that_the_model_has_not_are_refused_before_training(
    loader, saved, tmp_path, streaming, token, where, packing
):
    rows = [list(row) for row in GOOD]
    for row in rows[where]:
        row[2] = token
    made = loader(train_dir=saved(tmp_path / "a", rows), streaming=streaming, shuffle=False, packing=packing)
    refused(lambda: made.split("train"), "NXDT-D210", f"token {token}", "272 rows", "model.vocab_size")


def test_a_token_between_those_that_are_looked_at_is_told_when_it_is_read(loader, saved, tmp_path):
    rows = [[1] * 8 for _ in range(1000)]
    rows[7][3] = 300
    train = loader(train_dir=saved(tmp_path / "a", rows)).split("train")
    assert train[6].input_ids.tolist() == [1] * 8
    with pytest.raises(NxdtError, match=r"Sample 7 of .*/a has the token 300"):
        train[7]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("label", [-1, -101, 5_000])
@pytest.mark.parametrize("where", [slice(0, 1), slice(298, 300)])
@pytest.mark.parametrize("packing", [True, False])
def test_labels_are_looked_at_as_well(loader, saved, tmp_path, streaming, label, where, packing):
    labels = [[-100, -100, 3, 4, 5, 6, 7, 8] for _ in range(300)]
    for row in labels[where]:
        row[6] = label
    path = saved(tmp_path / "a", [[*range(8)]] * 300, labels=labels)
    made = loader(train_dir=path, streaming=streaming, shuffle=False, packing=packing)
    refused(lambda: made.split("train"), "NXDT-D210", f"token {label}", "272 rows")


@pytest.mark.parametrize("streaming", [False, True])
def test_labels_of_padding_may_be_any(loader, saved, tmp_path, streaming):
    path = saved(tmp_path / "a", GOOD, labels=[[*range(7), -1]] * 40, attention_mask=[[1] * 7 + [0]] * 40)
    read(lambda: loader(val_dir=path, streaming=streaming).split("validation"))


LABELLED = {"input_ids": GOOD, "labels": GOOD}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (LABELLED, {"input_ids": GOOD}, ("has 'input_ids'; the first rows", "have 'input_ids', 'labels'")),
        ({"input_ids": GOOD}, LABELLED, ("has 'input_ids', 'labels'; the first rows", "have 'input_ids'.")),
        ({"text": ["a"] * 40}, {"input_ids": GOOD}, ("has 'input_ids'; the first rows", "have 'text'")),
        ({"input_ids": GOOD}, {"text": ["a"] * 40}, ("has 'text'; the first rows", "have 'input_ids'")),
    ],
)
def test_files_of_a_stream_that_differ_in_columns_are_refused_by_name(loader, tmp_path, first, second, words):
    for name, columns in (("0", first), ("1", second)):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    stream = loader(train_dir=tmp_path, streaming=True, shuffle=False).split("train")
    refused(lambda: stream, "NXDT-D216", f"From row 0 on, {tmp_path}/1.parquet", str(tmp_path / "0.parquet"), *words)


def test_rows_of_a_file_that_lack_labels_are_refused_with_their_place(loader, tmp_path):
    lines = [json.dumps({"input_ids": GOOD[0], "labels": GOOD[0]})] * 256 + [json.dumps({"input_ids": GOOD[0]})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    stream = loader(train_dir=tmp_path, streaming=True, shuffle=False).split("train")
    refused(lambda: stream, "NXDT-D216", "From row 256 on", "a.jsonl")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("columns", "packing"),
    [
        ({"labels": [[-100] * 8] * 40}, None),
        ({"labels": [[-100] * 8] * 40}, True),
        ({"labels": [[5, *[-100] * 7]] * 40}, None),
        ({"labels": [[-100] * 4 + [5] * 4] * 40, "attention_mask": [[1] * 4 + [0] * 4] * 40}, None),
        ({"attention_mask": [[0] * 8] * 40}, None),
    ],
)
def test_data_of_which_nothing_is_learnt_is_refused(loader, saved, tmp_path, streaming, columns, packing):
    path = saved(tmp_path / "a", GOOD, **columns)
    made = loader(train_dir=path, streaming=streaming, packing=packing)
    refused(lambda: made.split("train"), "NXDT-D218", "data.train_dir", str(path), "-100", "in each of its rows")


def test_a_stream_is_refused_where_nothing_is_learnt_of_its_first_rows(loader, tmp_path):
    """The bound is counted in rows; a later one that is learnt of does for a stream below it."""
    unlearnt, learnt = [-100] * 8, [*range(8)]
    for name, count in (("most", 5000), ("some", 1000)):
        labels = [unlearnt] * count + [learnt]
        pq.write_table(pa.table({"input_ids": [learnt] * len(labels), "labels": labels}), tmp_path / f"{name}.parquet")
    made = loader(train_dir=tmp_path / "most.parquet", val_dir=tmp_path / "some.parquet", streaming=True)
    refused(lambda: made.split("train"), "NXDT-D218", "in its first 4096 rows")
    assert len(list(made.split("validation"))) == 1001


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_without_a_token_are_too_few(loader, saved, tmp_path, streaming):
    table = pa.table({"input_ids": pa.array([[]] * 300, pa.list_(pa.int64()))})
    datasets.Dataset(table).save_to_disk(tmp_path / "a")
    made = loader(train_dir=tmp_path / "a", streaming=streaming)
    refused(lambda: made.split("train"), TooFewTokens.code, "has 0 tokens")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_git_lfs_pointer_is_named_with_what_fetches_the_file(loader, saved, tmp_path, streaming):
    path = saved(tmp_path / "a", [[*range(8)]] * 40)
    next(path.glob("*.arrow")).write_text("version https://git-lfs.github.com/spec/v1")
    made = loader(train_dir=path, streaming=streaming, shuffle=False)
    refused(lambda: made.split("train"), "NXDT-D201", "git lfs pull")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_truncated_file_is_refused_by_name(loader, saved, tmp_path, streaming):
    path = saved(tmp_path / "a", [[*range(8)]] * 4000)
    (file,) = path.glob("*.arrow")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    made = loader(train_dir=path, streaming=streaming, shuffle=False)
    refused(lambda: made.split("train"), "NXDT-D201", str(file if streaming else path))


@pytest.mark.parametrize(
    ("name", "content", "code", "words"),
    [
        ("a.parquet", b"PAR1 and nothing", "NXDT-D201", "a.parquet"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1", "NXDT-D201", "git lfs pull"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1", "NXDT-D201", "git lfs pull"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "NXDT-D005", "a.jsonl:2"),
        ("a.jsonl", b'{"text": "x"}\n[1]', "NXDT-D005", "it is a list"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "caf\xe9"}', "NXDT-D004", "of line 2; it looks like CP1252"),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), "NXDT-D004", "iconv -f UTF-16 -t UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}', "NXDT-D203", "a.jsonl:2"),
        ("a.jsonl.gz", b"no gzip", "NXDT-D201", "a.jsonl.gz"),
        ("a.jsonl.gz", gzip.compress(b"x", mtime=0)[:10] + b"\xff" * 9, "NXDT-D201", "a.jsonl.gz"),
        ("a.jsonl.zst", b"no zstd", "NXDT-D201", "a.jsonl.zst"),
        ("a.csv", b"a,b", "NXDT-D211", ".parquet, .arrow, .jsonl"),
    ],
)
def test_damaged_and_unknown_files_of_a_stream_are_refused_by_name(loader, tmp_path, name, content, code, words):
    (tmp_path / name).write_bytes(content)
    refused(lambda: loader(train_dir=tmp_path / name, streaming=True).split("train"), code, words)


def test_a_state_that_the_library_left_half_written_is_refused(loader, saved, tmp_path):
    path = saved(tmp_path / "a", GOOD)
    (path / "state.json").write_text('{"_data_files": [')
    refused(lambda: loader(train_dir=path).split("train"), "NXDT-D201", str(path))
    refused(lambda: loader(train_dir=path, streaming=True).split("train"), "NXDT-D201", "state.json")


def broken_offsets(path, form, values=None):
    """A file of one batch whose second text or row begins far behind the end of its buffer."""
    values = values or pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32()))
    table = pa.table({"input_ids" if pa.types.is_list(values.type) else "text": values})
    with form(path, table.schema) as sink:
        sink.write_table(table)
    content, offsets = path.read_bytes(), values.offsets.to_numpy().tobytes() if hasattr(values, "offsets") else None
    offsets = offsets or b"".join(number.to_bytes(4, "little") for number in (0, 2, 4, 6))
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, offsets[:4] + (2**30).to_bytes(4, "little") + offsets[8:]))


@pytest.mark.parametrize("kind", ["rows", "texts"])
@pytest.mark.parametrize("form", [pa.ipc.new_stream, pa.ipc.new_file])
def test_offsets_that_lead_out_of_an_arrow_file_are_refused(loader, tmp_path, form, kind):
    """Arrow takes them on trust: it would read what lies there in memory, or abort the process."""
    path = tmp_path / "a.arrow"
    broken_offsets(path, form, pa.array(["aa", "bb", "cc"]) if kind == "texts" else None)
    made = loader(train_dir=path, streaming=True, packing=True, seq_length=2)
    refused(lambda: made.split("train"), "NXDT-D201", "a.arrow")
    with raises(ArrowUnreadable):
        read_records([path], "data.train_files")


@pytest.mark.parametrize("kind", ["rows", "texts"])
def test_offsets_that_lead_out_of_a_saved_dataset_are_refused(loader, tmp_path, kind):
    column = {"text": ["aa", "bb", "cc"]} if kind == "texts" else {"input_ids": [[1, 2], [3, 4], [5, 6]]}
    datasets.Dataset.from_dict(column).save_to_disk(tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.arrow")
    broken_offsets(file, pa.ipc.new_stream, pa.array(["aa", "bb", "cc"]) if kind == "texts" else None)
    made = loader(train_dir=tmp_path / "a", packing=True, seq_length=2)
    refused(lambda: made.split("train"), "NXDT-D201", str(tmp_path / "a"))


def test_an_endless_line_of_a_compressed_stream_is_refused(loader, tmp_path, monkeypatch):
    assert formats._LINE_BYTES == 256 << 20
    monkeypatch.setattr(formats, "_LINE_BYTES", 4 << 20)
    compressor = zstandard.ZstdCompressor().compressobj()
    with (tmp_path / "a.jsonl.zst").open("wb") as file:
        for _ in range(5):
            file.write(compressor.compress(b" " * 2**20))
        file.write(compressor.flush())
    assert (tmp_path / "a.jsonl.zst").stat().st_size < 100_000
    made = loader(train_dir=tmp_path / "a.jsonl.zst", streaming=True)
    refused(lambda: made.split("train"), "NXDT-D005", "longer than 4 MiB")


def test_files_that_change_between_passes_are_told(loader, tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"input_ids": [*range(8)]}) + "\n"
    path.write_text(line * 40)
    rows = iter(loader(train_dir=path, streaming=True, shuffle=False).split("train"))
    next(rows)
    with path.open("a") as file:
        file.write(line)
    with raises(DataFileChanged, match=r"a\.jsonl has changed"):
        list(islice(rows, 100))


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_a_small_file_does_not_expand_without_end(tmp_path, monkeypatch, form):
    monkeypatch.setattr("nxdt_core.data.files.tables.EXPANDS_TO_BYTES", 2**22)
    monkeypatch.setattr("nxdt_core.data.files.tables.EXPANDS_BY", 1)
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), ["a" * 2**17])
    table = pa.table({"text": repeated if form == "parquet" else ["a" * 2**17] * 200})
    path = tmp_path / ("a.parquet" if form == "parquet" else "a.arrow")
    if form == "parquet":
        pq.write_table(table, path, compression="zstd")
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with (pa.ipc.new_file if form == "file" else pa.ipc.new_stream)(path, table.schema, options=options) as writer:
            writer.write_table(table)
    with raises(DamagedDataset, match="expands to more than"):
        list(read_rows(path, "text"))


def test_compressed_batches_of_a_saved_dataset_are_limited(loader, saved, tmp_path, monkeypatch):
    monkeypatch.setattr("nxdt_core.data.files.tables.EXPANDS_TO_BYTES", 2**22)
    monkeypatch.setattr("nxdt_core.data.files.tables.EXPANDS_BY", 1)
    path = saved(tmp_path / "a", text=["a"])
    (file,) = path.glob("*.arrow")
    table = pa.table({"text": ["a" * 2**17] * 200})
    with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table, max_chunksize=8)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with raises(DamagedDataset, match="expands to more than"):
            loader(train_dir=path).split("train")
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 2**22


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "state.json", "dataset_info.json"])
def test_a_pipe_in_a_saved_dataset_is_not_waited_for(loader, saved, tmp_path, name):
    path = saved(tmp_path / "a", text=["a"])
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(NxdtError, match="NXDT-D20"):
        loader(train_dir=path).split("train")
