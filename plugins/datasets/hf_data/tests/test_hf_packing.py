"""Rows as documents: what datasets itself gives of the rows, end to end; texts beside the text plugin."""

from __future__ import annotations

import json
import subprocess
import sys

import datasets
import numpy as np
import pytest
from nxdt_plugin_hf_data.errors import CacheUnwritable, PaddedDocuments
from nxdt_testing.errors import raises

from nxdt_core.data.cache import file_digest
from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.data.tokens import tokenize
from nxdt_core.errors.data import DataNeedsTokenizer, SpecialTokenMissing, TooFewTokens
from nxdt_core.protocols.batch import IGNORE_INDEX
from nxdt_core.protocols.dataset import DataContext
from tests import processes

SEQ = 8


def test_samples_are_the_rows_end_to_end(loader, saved, tmp_path, documents):
    """Over several files and over rows that reach from one into the next."""
    datasets.Dataset.from_dict({"input_ids": documents}).save_to_disk(tmp_path / "a", num_shards=5)
    train = loader(train_dir=tmp_path / "a").split("train")
    flat = np.concatenate([np.array(ids, np.int64) for ids in datasets.load_from_disk(tmp_path / "a")["input_ids"]])
    assert len(train) == (len(flat) - 1) // SEQ
    for i in range(len(train)):
        assert train[i].input_ids.tolist() == flat[i * SEQ : (i + 1) * SEQ].tolist()


def test_documents_stay_apart(loader, saved, tmp_path):
    sample = loader(train_dir=saved(tmp_path / "a", [[1, 2, 3], [], [4, 5, 6, 7], [8, 9, 10]])).split("train")[0]
    assert sample.labels.tolist() == [2, 3, IGNORE_INDEX, 5, 6, 7, IGNORE_INDEX, 9]
    assert sample.document_ids.tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert sample.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("column", ["attention_mask", "position_ids"])
def test_documents_that_rows_mark_are_packed_as_rows_of_their_own(
    loader, saved, tmp_path, documents, contents, column, streaming
):
    groups = [documents[at : at + 3] for at in range(0, len(documents), 3)]
    marks = {
        "attention_mask": [[n for n, ids in enumerate(group, 1) for _ in ids] for group in groups],
        "position_ids": [[at for ids in group for at in range(len(ids))] for group in groups],
    }
    saved(tmp_path / "alone", documents)
    saved(
        tmp_path / "marked", [[token for ids in group for token in ids] for group in groups], **{column: marks[column]}
    )
    keys = {"streaming": streaming, "shuffle": False, "packing": True}
    alone, marked = (loader(train_dir=tmp_path / name, **keys).split("train") for name in ("alone", "marked"))
    count = (sum(map(len, documents)) - 1) // SEQ
    one, other = ([contents(each) for each, _ in zip(data, range(count), strict=False)] for data in (alone, marked))
    assert one == other
    assert len(one) == count > 50


def test_labels_are_packed_beside_their_tokens(loader, saved, tmp_path, documents):
    """Where a prompt is not learnt, it is not learnt in a packed sample either."""
    labels = [[IGNORE_INDEX] * (len(ids) // 2) + ids[len(ids) // 2 :] for ids in documents]
    train = loader(train_dir=saved(tmp_path / "a", documents, labels=labels)).split("train")
    flat = np.concatenate([np.array(row, np.int64) for row in labels])
    firsts = set(np.cumsum([0] + [len(ids) for ids in documents]).tolist())
    for i in range(len(train)):
        for j, label in enumerate(train[i].labels.tolist(), start=i * SEQ + 1):
            assert label == (IGNORE_INDEX if j in firsts else flat[j])


def test_padded_rows_are_not_packed(loader, saved, tmp_path):
    mask = [[1, 1, 0], [1, 1, 1, 1]]
    with raises(PaddedDocuments, match="attention_mask has zeros"):
        loader(train_dir=saved(tmp_path / "a", [[1, 2, 3], [4, 5, 6, 7]], attention_mask=mask)).split("train")


def test_texts_become_the_samples_that_the_text_plugin_makes_of_them(loader, saved, tmp_path, verses, contents):
    text = pytest.importorskip("nxdt_plugin_text.loader", reason="nxdt-plugin-text is not installed")
    config = pytest.importorskip("nxdt_plugin_text.config")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": verse}) + "\n" for verse in verses))
    context = DataContext(seq_length=SEQ, seed=1, tokenizer=ByteTokenizer())
    theirs = text.TextData(config.TextConfig(train_files=(tmp_path / "a.jsonl",)), context).split("train")
    ours = loader(train_dir=saved(tmp_path / "a", text=verses)).split("train")
    assert len(ours) == len(theirs) > 400
    assert [contents(ours[i]) for i in range(len(ours))] == [contents(theirs[i]) for i in range(len(theirs))]


def test_each_text_may_be_a_sample(loader, saved, tmp_path):
    train = loader(train_dir=saved(tmp_path / "a", text=["abc", "", "d"]), packing=False, add_bos=True).split("train")
    assert [train[i].input_ids.tolist() for i in range(len(train))] == [
        [256, *b"abc", 257, 0, 0, 0],
        [256, *b"d", 257, 0, 0, 0, 0, 0],
    ]
    assert train[1].document_ids.tolist() == [0, 0, 0, -1, -1, -1, -1, -1]


def test_rows_without_text_are_counted(loader, saved, tmp_path, caplog):
    loader(train_dir=saved(tmp_path / "a", text=["a text", "", "that is long", ""])).split("train")
    assert "left out 2 records: the text is empty" in caplog.text


def test_another_column_may_hold_the_text(loader, saved, tmp_path):
    path = saved(tmp_path / "a", story=["a story that is long enough"])
    assert bytes(loader(train_dir=path, text_key="story").split("train")[0].input_ids.tolist()) == b"a story "


def test_text_needs_a_tokenizer_with_the_tokens_that_are_asked_for(loader, saved, tmp_path):
    class Bare(ByteTokenizer):
        eos_id = None

    path = saved(tmp_path / "a", text=["a text that is long enough"])
    with raises(DataNeedsTokenizer):
        loader(train_dir=path, tokenizer=None).split("train")
    with raises(SpecialTokenMissing, match=r"data\.add_eos"):
        loader(train_dir=path, tokenizer=Bare()).split("train")
    assert loader(train_dir=path, tokenizer=Bare(), add_eos=False).split("train")
    with raises(SpecialTokenMissing, match=r"data\.eod_mask_loss"):
        loader(train_dir=saved(tmp_path / "b", [[1] * 20]), tokenizer=None, eod_mask_loss=True)


def test_too_few_tokens_are_refused_with_both_numbers(loader, saved, tmp_path):
    with raises(TooFewTokens, match=r"train data has 5 tokens.* 8 needs 9"):
        loader(train_dir=saved(tmp_path / "a", [[1, 2], [3, 4, 5]])).split("train")


class Counting(ByteTokenizer):
    """Says what it was given."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def encode_to_arrays(self, texts):
        self.texts += texts
        return super().encode_to_arrays(texts)


def test_tokens_of_texts_are_kept_for_the_next_run_of_the_same_data(loader, saved, tmp_path, verses, contents):
    path, cache = saved(tmp_path / "a", text=verses), tmp_path / "cache" / "deep"

    def counted(**keys):
        tokenizer = Counting()
        train = loader(train_dir=keys.pop("train_dir", path), cache_dir=cache, tokenizer=tokenizer, **keys)
        return train.split("train"), len(tokenizer.texts)

    first, texts = counted()
    again, none = counted(seq_length=8)
    assert (texts, none) == (60, 0)
    assert [contents(first[i]) for i in range(len(first))] == [contents(again[i]) for i in range(len(first))]
    assert counted(add_bos=True)[1] == counted(train_dir=saved(tmp_path / "b", text=verses[1:]))[1] + 1 == 60


def test_tokens_are_not_those_of_a_text_that_was_changed(loader, saved, tmp_path, verses, contents, monkeypatch):
    """The change keeps the length, and is outside the blocks that stand for a large file."""
    monkeypatch.setattr("nxdt_core.data.cache._BLOCK_BYTES", 1)
    for place in ("nxdt_core.data.cache", "nxdt_plugin_hf_data.formats"):
        monkeypatch.setattr(f"{place}.SAMPLED_FROM_BYTES", 0)
    old = saved(tmp_path / "old", text=["x" * 2000, *verses])
    new = saved(tmp_path / "new", text=["x" * 999 + "yy" + "x" * 999, *verses])
    assert len({file_digest(file) for path in (old, new) for file in path.glob("*.arrow")}) == 1
    of_old, of_new = (loader(train_dir=path, cache_dir=tmp_path / "cache").split("train") for path in (old, new))
    assert of_old.fingerprint() != of_new.fingerprint()
    assert any(contents(of_old[i]) != contents(of_new[i]) for i in range(len(of_old)))


def test_what_an_aborted_run_leaves_is_not_taken(loader, saved, tmp_path, verses):
    path, cache = saved(tmp_path / "a", text=verses), tmp_path / "cache"
    whole = len(loader(train_dir=path, cache_dir=cache).split("train"))
    (tokens,) = cache.glob("*/tokens.npy")
    tokens.write_bytes(tokens.read_bytes()[:100])
    assert len(loader(train_dir=path, cache_dir=cache).split("train")) == whole


_MAKES = """
import sys, time
from pathlib import Path
import numpy as np
from nxdt_core.data.tokens import TokenStream
from nxdt_plugin_hf_data.loader import cached

def make():
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    time.sleep(1)
    return TokenStream(tokens=np.arange(9, dtype=np.uint8), starts=np.zeros(1, np.int64))

print(len(cached(Path(sys.argv[1]), "name", make).tokens))
"""


def test_of_several_processes_one_tokenises_and_all_have_the_tokens(tmp_path):
    command = [sys.executable, "-c", _MAKES, str(tmp_path / "cache"), str(tmp_path / "log")]
    started = [processes.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[0] for process in started] == ["9\n"] * 3
    assert (tmp_path / "log").read_text() == "made\n"


def test_a_full_or_forbidden_directory_is_told_by_its_key(loader, saved, tmp_path, verses):
    (tmp_path / "file").write_text("")
    made = loader(train_dir=saved(tmp_path / "a", text=verses), cache_dir=tmp_path / "file")
    with raises(CacheUnwritable, match=r"file cannot be written, .*\n?.*data\.cache_dir"):
        made.split("train")


def test_the_tokens_are_those_of_the_core(loader, saved, tmp_path, verses):
    stream = tokenize(verses, ByteTokenizer(), eos_id=257)
    train = loader(train_dir=saved(tmp_path / "a", text=verses)).split("train")
    ids = np.concatenate([train[i].input_ids for i in range(len(train))])
    assert ids.tolist() == stream.tokens[: len(ids)].tolist()
