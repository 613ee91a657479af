"""Files in, exact samples out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nxdt_plugin_text.config import TextConfig
from nxdt_plugin_text.loader import TextData
from nxdt_testing.dataset_contract import take_steps
from nxdt_testing.errors import raises

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.errors.data import DataNeedsTokenizer, DocumentWeightWrong, SpecialTokenMissing, TooFewTokens
from nxdt_core.protocols.batch import IGNORE_INDEX
from nxdt_core.protocols.dataset import DataContext, DatasetSplits, MapDataset
from nxdt_core.system.paths import resolve_path

EOS, BOS = ByteTokenizer.eos_id, ByteTokenizer.bos_id


class NoSpecialTokens(ByteTokenizer):
    bos_id = eos_id = None

    def fingerprint(self):
        return "bare"


def dataloader(seq_length=4, tokenizer=None, **keys):
    context = DataContext(seq_length=seq_length, seed=1, tokenizer=tokenizer or ByteTokenizer())
    return TextData(TextConfig(**keys), context)


@pytest.fixture
def alphabet(tmp_path):
    path = tmp_path / "alphabet.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz")
    return path


def inputs(dataset):
    return [dataset[i].input_ids.tolist() for i in range(len(dataset))]


def test_text_becomes_shifted_samples(alphabet):
    loader = dataloader(train_files=(alphabet,))
    train = loader.split("train")
    assert isinstance(loader, DatasetSplits)
    assert isinstance(train, MapDataset)
    assert len(train) == 6
    assert bytes(train[0].input_ids.tolist()) == b"abcd"
    assert bytes(train[5].labels.tolist()) == b"vwxy"
    assert loader.split("validation") is loader.split("test") is None


def test_documents_end_with_the_end_token_and_stay_apart(tmp_path):
    (tmp_path / "a.txt").write_text("ab\n\ncde\n\nf")
    sample = dataloader(8, train_files=(tmp_path / "a.txt",), document_separator="\n\n").split("train")[0]
    assert sample.input_ids.tolist() == [*b"ab", EOS, *b"cde", EOS, *b"f"]
    assert sample.labels.tolist() == [98, EOS, IGNORE_INDEX, 100, 101, EOS, IGNORE_INDEX, EOS]
    assert sample.document_ids.tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert sample.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]


def test_a_document_s_weight_is_that_of_its_labels_and_0_leaves_it_out(tmp_path):
    lines = [
        '{"text": "ab", "w": 2}',
        '{"text": ""}',
        '{"text": "xy", "w": 0}',
        '{"text": "cde"}',
        '{"text": "fg", "w": 0.5}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    files = {"train_files": (tmp_path / "a.jsonl",)}
    loader = dataloader(3, **files, weight_key="w")
    train = loader.split("train")
    samples = [train[index] for index in range(len(train))]
    assert [bytes(each.input_ids.clip(0, 126).tolist()) for each in samples] == [b"ab~", b"cde", b"~fg"]
    assert [each.loss_weights.tolist() for each in samples] == [[2, 2, 0], [1, 1, 1], [0, 0.5, 0.5]]
    assert train.fingerprint() != dataloader(3, **files).split("train").fingerprint()
    assert dataloader(3, **files).split("train")[0].loss_weights is None
    joined = dataloader(3, **files, weight_key="w", reset_attention_mask=False).split("train")
    assert joined[0].loss_weights.tolist() == [2, 2, 1]
    held = dataloader(3, **files, weight_key="w", validation_fraction=0.4).split("validation")
    assert held[0].loss_weights.tolist() == [0, 0.5, 0.5]


@pytest.mark.parametrize("weight", ["-1", "true", '"2"', "NaN", "Infinity", "1e300", "1" + 400 * "0"])
def test_a_document_s_weight_is_a_number_of_at_least_0(weight, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abcdef"}\n{"text": "ab", "w": ' + weight + "}")
    with raises(DocumentWeightWrong, match=r"a\.jsonl:2: the weight under the key 'w' is"):
        dataloader(3, train_files=(tmp_path / "a.jsonl",), weight_key="w").split("train")


def test_options_put_begin_tokens_and_let_documents_see_each_other(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "cd"}\n{"text": "ef"}')
    sample = dataloader(
        6,
        train_files=(tmp_path / "a.jsonl",),
        add_bos=True,
        reset_attention_mask=False,
        reset_position_ids=False,
        eod_mask_loss=True,
    ).split("train")[0]
    assert sample.input_ids.tolist() == [BOS, *b"ab", EOS, BOS, *b"c"]
    assert sample.labels.tolist() == [97, 98, EOS, IGNORE_INDEX, 99, 100]
    assert sample.document_ids is sample.position_ids is None


def test_files_follow_each_other_in_the_order_that_is_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 4)
    train = dataloader(9, train_files=(tmp_path / "b", tmp_path / "a")).split("train")
    assert inputs(train) == [[*b"bbbb", EOS, *b"aaaa"]]


def test_a_fraction_is_taken_from_the_end_and_shares_no_token(alphabet):
    loader = dataloader(4, train_files=(alphabet,), validation_fraction=0.4, add_eos=False)
    train, validation = loader.split("train"), loader.split("validation")
    assert [bytes(row) for row in inputs(train)] == [b"abcd", b"efgh", b"ijkl"]
    assert [bytes(row) for row in inputs(validation)] == [b"qrst", b"uvwx"]
    assert bytes(train[2].labels.tolist()) == b"jklm"
    assert train.fingerprint() != validation.fingerprint()


def test_files_of_the_other_splits_are_read(alphabet, tmp_path):
    (tmp_path / "other").write_text("0123456789")
    loader = dataloader(4, train_files=(alphabet,), validation_files=(tmp_path / "other",), test_files=(alphabet,))
    assert bytes(loader.split("validation")[0].input_ids.tolist()) == b"0123"
    assert len(loader.split("test")) == 6


@pytest.mark.parametrize(("seq_length", "fits"), [(26, True), (27, False), (100, False)])
def test_a_split_shorter_than_a_sample_is_refused_with_both_numbers(alphabet, seq_length, fits):
    loader = dataloader(seq_length, train_files=(alphabet,))
    if fits:
        assert len(loader.split("train")) == 1
        return
    with raises(TooFewTokens, match=f"train data has 27 tokens.* {seq_length} needs {seq_length + 1}"):
        loader.split("train")


def test_a_fraction_too_small_for_a_sample_names_the_split_and_the_key(alphabet):
    loader = dataloader(10, train_files=(alphabet,), validation_fraction=0.1)
    with raises(TooFewTokens, match=r"validation data has 3 tokens[\s\S]*validation_fraction"):
        loader.split("validation")


def test_text_without_a_tokenizer_is_refused(alphabet):
    with raises(DataNeedsTokenizer, match=r"data\.tokenizer\.library"):
        TextData(TextConfig(train_files=(alphabet,)), DataContext(seq_length=4, seed=1, tokenizer=None))


@pytest.mark.parametrize("key", ["add_eos", "add_bos"])
def test_special_tokens_that_the_tokenizer_lacks_are_refused_by_key(alphabet, key):
    keys = {"add_eos": False, "add_bos": False, key: True}
    with raises(SpecialTokenMissing, match=rf"data\.{key}"):
        dataloader(tokenizer=NoSpecialTokens(), train_files=(alphabet,), **keys)
    keys[key] = False
    assert dataloader(tokenizer=NoSpecialTokens(), train_files=(alphabet,), **keys).split("train")


def test_the_fingerprint_knows_content_tokenizer_and_settings_but_not_names(alphabet, tmp_path):
    def fingerprint(path=alphabet, seq_length=4, tokenizer=None, **keys):
        return dataloader(seq_length, tokenizer, train_files=(path,), **keys).split("train").fingerprint()

    copy, other = tmp_path / "copy.txt", tmp_path / "other.txt"
    copy.write_bytes(alphabet.read_bytes())
    other.write_bytes(alphabet.read_bytes().upper())
    variants = [
        fingerprint(),
        fingerprint(other),
        fingerprint(seq_length=5),
        fingerprint(add_eos=False),
        fingerprint(add_eos=False, tokenizer=NoSpecialTokens()),
        fingerprint(add_bos=True),
        fingerprint(document_separator="m"),
        fingerprint(reset_attention_mask=False),
        fingerprint(validation_fraction=0.3),
    ]
    assert len(set(variants)) == len(variants)
    assert fingerprint(copy) == variants[0]


def shipped():
    return dataloader(
        64, train_files=(resolve_path("package://nxdt_plugin_text/data/kjv.txt"),), document_separator="\n\n"
    )


def test_a_run_over_the_shipped_text_resumes_exactly_on_other_ranks():
    def steps(rank, size, state=None, count=6):
        dataset, cut = shipped().split("train"), {"global_batch_size": 8, "seed": 3}
        read, behind = take_steps(
            dataset, count, **cut, micro_batch_size=2, rank=rank, size=size, state=state, workers=1
        )
        return torch.stack([torch.cat([batch.input_ids for batch in batches]) for batches in read]), behind

    whole, _ = steps(0, 1)
    _, state = steps(0, 1, count=2)
    ranks = [steps(rank, 4, state, 4)[0] for rank in range(4)]
    assert torch.equal(torch.cat(ranks, dim=1), whole[2:])


def test_all_the_shipped_text_is_in_the_samples():
    train = shipped().split("train")
    tokens = np.concatenate([train[i].input_ids for i in range(len(train))])
    text = ByteTokenizer().decode(tokens.tolist())
    assert text.startswith("GenesisIn the beginning God created the heaven and the earth.\n")
    assert 20_000 < len(train) < 23_000
