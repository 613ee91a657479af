"""Rows as samples: tokens that were cut for training before, beside what transformers learns of the same rows."""

from __future__ import annotations

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from nxdt_plugin_hf_data.errors import ColumnUnread, MisfitRows, RowTooLong
from nxdt_testing.errors import raises

from nxdt_core.protocols.batch import IGNORE_INDEX
from nxdt_core.protocols.dataset import DatasetSplits, MapDataset

SEQ, VOCABULARY = 8, 272
ROWS = np.random.default_rng(0).integers(0, VOCABULARY, (12, SEQ)).tolist()


def transformers_loss(logits, labels):
    """The loss of a causal model of transformers, which shifts logits and labels itself."""
    modeling = pytest.importorskip("transformers.loss.loss_utils", reason="transformers is not installed")
    return modeling.ForCausalLMLoss(logits=logits, labels=labels, vocab_size=VOCABULARY)


def test_rows_of_a_samples_length_are_samples(saved, loader, tmp_path):
    made = loader(train_dir=saved(tmp_path / "a", ROWS), tokenizer=None)
    train = made.split("train")
    assert isinstance(made, DatasetSplits)
    assert isinstance(train, MapDataset)
    assert [train[i].input_ids.tolist() for i in range(len(train))] == ROWS
    assert train[3].labels.tolist() == [*ROWS[3][1:], IGNORE_INDEX]
    assert train[3].position_ids is train[3].document_ids is None
    assert made.split("validation") is made.split("test") is None
    with pytest.raises(IndexError):
        train[12]


def test_a_row_with_one_token_more_learns_all_of_its_labels(saved, loader, tmp_path):
    rows = [[*row, 7] for row in ROWS]
    train = loader(train_dir=saved(tmp_path / "a", rows)).split("train")
    assert train[2].input_ids.tolist() == ROWS[2]
    assert train[2].labels.tolist() == [*ROWS[2][1:], 7]


@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_the_loss_is_that_of_transformers_on_the_same_columns(saved, loader, tmp_path, padding):
    """Both shift: here the dataset, there the model."""
    labels = np.array(ROWS)
    labels[:, :3] = IGNORE_INDEX
    mask = np.ones_like(labels)
    if padding != "none":
        padded = slice(5, None) if padding == "right" else slice(None, 4)
        mask[:, padded] = 0
        labels[:, padded] = labels[:, 4] = IGNORE_INDEX  # on the left, nothing tells the first token
    saved(tmp_path / "a", ROWS, labels=labels.tolist(), attention_mask=mask.tolist())
    train = loader(train_dir=tmp_path / "a").split("train")
    logits = torch.randn(len(ROWS), SEQ, VOCABULARY, generator=torch.Generator().manual_seed(0))
    ours = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(np.concatenate([train[i].labels for i in range(len(ROWS))]))
    )
    row = datasets.load_from_disk(tmp_path / "a").with_format("torch")
    torch.testing.assert_close(ours, transformers_loss(logits, row["labels"][:]))


def test_padding_is_no_document_and_restarts_positions(saved, loader, tmp_path):
    mask = [[0, 0, 1, 1, 1, 1, 0, 0]] * len(ROWS)
    sample = loader(train_dir=saved(tmp_path / "a", ROWS, attention_mask=mask)).split("train")[0]
    ids = ROWS[0]
    assert sample.document_ids.tolist() == [-1, -1, 0, 0, 0, 0, -1, -1]
    assert sample.position_ids.tolist()[2:6] == [0, 1, 2, 3]
    assert sample.labels.tolist() == [-100, -100, ids[3], ids[4], ids[5], -100, -100, -100]


MARKS = {
    "numbers": {"attention_mask": [1, 1, 1, 2, 2, 2, 3, 0]},
    "positions": {"position_ids": [0, 1, 2, 0, 1, 2, 0, 1], "attention_mask": [1, 1, 1, 1, 1, 1, 1, 0]},
    "both": {"position_ids": [0, 1, 2, 0, 1, 2, 0, 0], "attention_mask": [1, 1, 1, 2, 2, 2, 3, 0]},
}
"""Three documents and padding in a row, as packing collators of other tools mark them."""


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("marks", MARKS)
def test_documents_that_a_row_marks_are_kept_apart(saved, loader, tmp_path, marks, streaming):
    columns = {name: [values] * len(ROWS) for name, values in MARKS[marks].items()}
    keys = {"train_dir": saved(tmp_path / "a", ROWS, **columns), "streaming": streaming, "shuffle": False}
    sample, together = (
        next(iter(train)) if streaming else train[0]
        for train in (loader(**keys).split("train"), loader(**keys, reset_attention_mask=False).split("train"))
    )
    _, b, c, d, e, f, g, _ = ROWS[0]
    assert sample.labels.tolist() == [b, c, -100, e, f, -100, -100, -100]
    assert sample.document_ids.tolist() == [0, 0, 0, 1, 1, 1, 2, -1]
    assert sample.position_ids.tolist()[:7] == [0, 1, 2, 0, 1, 2, 0]
    assert together.labels.tolist() == [b, c, d, e, f, g, -100, -100]
    assert together.document_ids.tolist() == [0] * 7 + [-1]


def test_positions_that_count_on_mark_one_document(saved, loader, tmp_path, contents):
    plain = loader(train_dir=saved(tmp_path / "a", ROWS)).split("train")
    positions = [[*range(SEQ)]] * len(ROWS)
    same = loader(train_dir=saved(tmp_path / "b", ROWS, position_ids=positions)).split("train")
    assert contents(same[0]) == contents(plain[0])
    kept = loader(train_dir=tmp_path / "a", reset_position_ids=False).split("train")
    assert len({plain.fingerprint(), kept.fingerprint()}) == 2


@pytest.mark.parametrize(
    ("column", "instead"),
    [("seq_lengths", "position_ids"), ("seq_idx", "position_ids"), ("completion_mask", "labels")],
)
def test_columns_of_documents_and_labels_that_are_not_read_are_refused(saved, loader, tmp_path, column, instead):
    other = {column: [[1] * SEQ] * len(ROWS)}
    with raises(ColumnUnread, match=f"has a column '{column}', .* none called '{instead}'") as caught:
        loader(train_dir=saved(tmp_path / "a", ROWS, **other)).split("train")
    assert caught.value.code == "NXDT-D219"
    saved(tmp_path / "b", ROWS, **other, **{instead: [[*range(SEQ)]] * len(ROWS)})
    assert len(loader(train_dir=tmp_path / "b").split("train")) == len(ROWS)


def test_rows_that_are_not_to_be_packed_are_padded(contents, saved, loader, tmp_path):
    train = loader(train_dir=saved(tmp_path / "a", [[5, 6, 7], [*range(9)]]), packing=False).split("train")
    assert contents(train[0]) == (
        [5, 6, 7, 0, 0, 0, 0, 0],
        [6, 7, *[IGNORE_INDEX] * 6],
        [0, 1, 2, *[2] * 5],
        [0, 0, 0, *[-1] * 5],
    )
    assert train[1].labels.tolist() == [*range(1, 9)]


def test_a_row_that_does_not_fit_is_refused_not_cut(saved, loader, tmp_path):
    made = loader(train_dir=saved(tmp_path / "a", [[1], [2] * 11]), packing=False)
    with raises(RowTooLong, match=r"Row 1 of .* has 11 tokens; a sample has 8"):
        made.split("train")


def test_rows_cut_for_another_length_are_refused_unless_they_are_to_be_packed(saved, loader, tmp_path):
    saved(tmp_path / "a", [[1] * 16] * 4)
    with raises(MisfitRows, match=r"Each row of .* has 16 tokens; a sample of this run has 8"):
        loader(train_dir=tmp_path / "a").split("train")
    assert len(loader(train_dir=tmp_path / "a", packing=True).split("train")) == 7


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.uint16()),
        pa.list_(pa.int32()),
        pa.large_list(pa.int64()),
        pa.list_(pa.uint32(), SEQ),
        pa.list_(pa.int16(), SEQ),
    ],
    ids=str,
)
def test_every_type_of_integers_and_lists_gives_the_same_samples(loader, tmp_path, kind):
    table = pa.table({"input_ids": pa.array(ROWS, kind)})
    datasets.Dataset(table).save_to_disk(tmp_path / "a", num_shards=3)
    train = loader(train_dir=tmp_path / "a").split("train")
    assert [train[i].input_ids.tolist() for i in range(len(train))] == ROWS
    assert train[0].input_ids.dtype == np.int64


def test_a_directory_with_splits_gives_each_its_own(loader, tmp_path):
    parts = {
        name: datasets.Dataset.from_dict({"input_ids": ROWS[i:]}) for i, name in enumerate(("train", "validation"))
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "a")
    made = loader(train_dir=tmp_path / "a", val_dir=tmp_path / "a")
    assert len(made.split("train")) == 12
    assert made.split("validation")[0].input_ids.tolist() == ROWS[1]


def test_the_fingerprint_knows_content_and_length_but_not_the_place(saved, loader, tmp_path):
    changed = [ROWS[0][::-1], *ROWS[1:]]
    one, two, other = (saved(tmp_path / name, rows) for name, rows in (("a", ROWS), ("b", ROWS), ("c", changed)))
    prints = [loader(train_dir=path).split("train").fingerprint() for path in (one, two, other)]
    padded = loader(train_dir=one, seq_length=9, packing=False).split("train").fingerprint()
    assert prints[0] == prints[1]
    assert len({prints[0], prints[2], padded}) == 3
