"""The section ``data`` becomes splits, blends and samples; what cannot work is refused in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from nxdt_plugin_megatron_data.config import MegatronDataConfig, short_names
from nxdt_plugin_megatron_data.errors import (
    EmptySplit,
    EndOfDocumentUnknown,
    OtherTokenizer,
    TokenOutsideVocabulary,
)
from nxdt_plugin_megatron_data.indexed_files import Provenance, provenance_path
from nxdt_plugin_megatron_data.loader import MegatronData
from nxdt_testing.dataset_contract import take_steps
from nxdt_testing.errors import raises

from nxdt_core import config
from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.dataset import DataContext, DatasetSplits, MapDataset

EOS = ByteTokenizer.eos_id
CONTEXT = DataContext(seq_length=16, seed=11, tokenizer=None)
BYTES = replace(CONTEXT, tokenizer=ByteTokenizer())


def dataloader(prefix, context=CONTEXT, **keys):
    return MegatronData(MegatronDataConfig(data_prefix=prefix, **keys), context)


def train(prefix, context=CONTEXT, **keys):
    return dataloader(prefix, context, **keys).split("train")


def inputs(dataset):
    return [dataset[i].input_ids.tolist() for i in range(len(dataset))]


@pytest.fixture
def corpus(by_hand, sequences):
    return by_hand("corpus", sequences)


@pytest.fixture
def two(by_hand):
    return by_hand("low", [[i] * 17 for i in range(20)]), by_hand("high", [[100 + i] * 17 for i in range(60)])


def test_a_prefix_gives_samples_of_all_its_documents(corpus, sequences):
    loader = dataloader(corpus)
    samples = loader.split("train")
    assert isinstance(loader, DatasetSplits)
    assert isinstance(samples, MapDataset)
    assert len(samples) == (sum(map(len, sequences)) - 1) // 16
    assert loader.split("validation") is loader.split("test") is None
    sample = samples[3]
    assert sample.input_ids.tolist()[1:] == sample.labels.tolist()[:-1]
    assert sample.document_ids is sample.position_ids is sample.loss_weights is None


def test_splits_share_no_document_and_leave_none_out(by_hand):
    prefix = by_hand("corpus", [[i] * 17 for i in range(100)])
    loader = dataloader(prefix, splits_string="80,15,5")
    seen = [{token for row in inputs(loader.split(name)) for token in row} for name in ("train", "validation", "test")]
    assert seen == [set(range(80)), set(range(80, 95)), set(range(95, 100))]


def test_a_share_of_nothing_is_no_split(corpus):
    loader = dataloader(corpus, splits_string="9,1,0")
    assert loader.split("validation") is not None
    assert loader.split("test") is None


def test_each_split_may_have_files_of_its_own(two):
    low, high = two
    loader = dataloader({"train": (low,), "validation": high}, splits_string="1,0,0")
    assert max(map(max, inputs(loader.split("train")))) < 20
    assert min(map(min, inputs(loader.split("validation")))) >= 100
    assert loader.split("test") is None


def test_weights_blend_and_a_list_without_weights_chains(two):
    low, high = two
    blended = [row[0] < 100 for row in inputs(train((0.5, low, 1.5, high)))]
    assert sum(blended[:40]) == 10
    chained = inputs(train((low, high)))
    assert len(chained) == len(train(low)) + len(train(high))
    assert len({tuple(row) for row in chained}) == len(chained)
    assert inputs(train((1.0, low))) == inputs(train((low,))) == inputs(train(low))


def test_a_blend_is_validated_file_by_file_in_its_shares(two):
    low, high = two
    sets = dataloader({"train": low, "validation": (0.25, low, 0.75, high)}).split("validation")
    assert {name: len(rows) for name, rows in sets.items()} == {"low": len(train(low)), "high": 3 * len(train(low))}
    assert max(map(max, inputs(sets["low"]))) < 20
    assert inputs(sets["high"]) == inputs(train(high))[: 3 * len(train(low))]


def test_files_without_weights_are_validated_whole(two):
    low, high = two
    loader = dataloader((low, high), splits_string="1,1,0")
    assert {name: len(rows) for name, rows in loader.split("validation").items()} == {"low": 10, "high": 31}
    assert loader.split("test") is None


def test_a_file_that_is_named_twice_is_one_set(two):
    low, high = two
    loader = dataloader({"train": low, "validation": (0.5, low, 1.0, high, 0.5, low), "test": (low, low)})
    assert {name: len(rows) for name, rows in loader.split("validation").items()} == {"low": 21, "high": 21}
    assert inputs(loader.split("test")) == inputs(train(low))


def test_names_of_sets_are_as_short_as_tells_them_apart():
    def names(*paths):
        return short_names([Path(path) for path in paths])

    assert names("/d/books", "/d/web") == ["books", "web"]
    assert names("/d/books/text", "/d/web/text", "/d/web/code") == ["books/text", "web/text", "code"]
    assert names("/a/b/text", "/c/b/text", "/text") == ["a/b/text", "c/b/text", "/text"]


def test_documents_that_share_a_sample_are_kept_apart_on_request(by_hand):
    prefix = by_hand("corpus", [[1, 2, EOS], [3, 4, 5, 6, EOS], [7] * 5 + [EOS]])
    keys = {"reset_attention_mask": True, "reset_position_ids": True}
    sample = train(prefix, replace(BYTES, seq_length=13), **keys)[0]
    ends = np.flatnonzero(sample.input_ids == EOS)
    borders = ends[ends < 12] + 1
    assert len(borders) == 2
    documents, positions = np.zeros(13, int), np.arange(13)
    for border in borders:
        documents[border:] += 1
        positions[border:] = np.arange(13 - border)
    assert sample.document_ids.tolist() == documents.tolist()
    assert sample.position_ids.tolist() == positions.tolist()
    assert np.flatnonzero(sample.labels == -100).tolist() == (borders - 1).tolist()
    plain = train(prefix, replace(BYTES, seq_length=13))[0]
    assert (plain.labels != -100).all()
    assert plain.input_ids.tolist() == sample.input_ids.tolist()


def test_positions_and_masked_ends_are_those_of_megatron_core(megatron, corpus, sequences, tmp_path):
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    class Seven(ByteTokenizer):
        eos_id = 7

    context = replace(CONTEXT, tokenizer=Seven())
    samples = train(corpus, context, reset_position_ids=True, eod_mask_loss=True)
    masks = train(corpus, context, reset_attention_mask=True)
    for number in range(len(samples)):
        ids = torch.from_numpy(samples[number].input_ids)
        attention, loss, positions = _get_ltor_masks_and_position_ids(ids, 7, True, True, True, True)
        assert samples[number].position_ids.tolist() == positions.tolist()
        assert (samples[number].labels != -100).tolist() == loss.bool().tolist()
        documents = torch.from_numpy(masks[number].document_ids)
        causal = torch.ones(16, 16, dtype=torch.bool).tril()
        assert torch.equal(~attention[0], causal & (documents[:, None] == documents[None, :]))


def test_documents_without_an_end_token_are_still_told_apart(by_hand):
    prefix = by_hand("bare", [[1] * 6, [2] * 6, [3] * 6])
    sample = train(prefix, reset_attention_mask=True)[0]
    assert np.unique(sample.document_ids).tolist() == [0, 1, 2]
    assert (np.diff(sample.input_ids) != 0).tolist() == np.diff(sample.document_ids).astype(bool).tolist()


def test_samples_without_the_extra_token_end_with_no_label(by_hand):
    prefix = by_hand("corpus", [list(range(64))])
    rows = train(prefix, no_seqlen_plus_one_input_tokens=True)
    assert len(rows) == 4
    assert sorted(inputs(rows)) == [list(range(k, k + 16)) for k in (0, 16, 32, 48)]
    assert all(row.labels.tolist() == [*row.input_ids[1:].tolist(), -100] for row in map(rows.__getitem__, range(4)))
    assert len(train(prefix)) == 3


def test_what_is_left_of_a_validation_is_filled_up_on_request(by_hand):
    prefix = by_hand("corpus", [list(range(1, 27))])
    keys = {"reset_attention_mask": True}
    assert len(dataloader({"validation": prefix}, **keys).split("validation")) == 1
    kept = dataloader({"validation": prefix, "train": prefix}, validation_drop_last=False, **keys)
    rest = next(row for row in map(kept.split("validation").__getitem__, range(2)) if (row.labels == -100).any())
    assert len(kept.split("validation")) == 2
    assert rest.input_ids.tolist() == [*range(17, 27), *[0] * 6]
    assert rest.labels.tolist() == [*range(18, 27), *[-100] * 7]
    assert rest.document_ids.tolist() == [0] * 10 + [-1] * 6
    assert rest.padding.tolist() == [False] * 10 + [True] * 6
    assert len(kept.split("train")) == 1


def test_the_order_is_that_of_the_seed_and_of_nothing_else(corpus):
    assert inputs(train(corpus)) == inputs(train(corpus))
    assert inputs(train(corpus)) != inputs(train(corpus, replace(CONTEXT, seed=12)))


def test_indices_are_kept_where_they_are_wanted(corpus, tmp_path):
    train(corpus, index_mapping_dir=tmp_path / "elsewhere")
    (kept,) = (tmp_path / "elsewhere").iterdir()
    assert kept.name.startswith("corpus-train-")
    assert not (tmp_path / "index_mapping").exists()
    train(corpus)
    assert (tmp_path / "index_mapping" / kept.name).is_dir()


def test_the_fingerprint_knows_content_and_settings_but_not_names(by_hand, sequences):
    same, other = by_hand("same", sequences), by_hand("other", [*sequences[:-2], sequences[-2][::-1]])
    first = by_hand("first", sequences)
    variants = [
        train(first).fingerprint(),
        train(other).fingerprint(),
        train(first, splits_string="9,1").fingerprint(),
        train(first, replace(CONTEXT, seed=1)).fingerprint(),
        train(first, replace(CONTEXT, seq_length=15)).fingerprint(),
        train(first, reset_attention_mask=True).fingerprint(),
        train(first, reset_position_ids=True).fingerprint(),
        train(first, BYTES, eod_mask_loss=True).fingerprint(),
        train(first, no_seqlen_plus_one_input_tokens=True).fingerprint(),
        train((0.5, first, 0.5, other)).fingerprint(),
        train((first, other)).fingerprint(),
    ]
    assert len(set(variants)) == len(variants)
    assert train(same).fingerprint() == variants[0]


def test_a_run_goes_on_in_the_middle_of_a_pass_on_another_number_of_ranks(two):
    low, high = two

    def steps(rank, size, state=None, count=9):
        dataset, cut = train((0.3, low, 0.7, high), reset_position_ids=True), {"global_batch_size": 12, "seed": 3}
        read, behind = take_steps(
            dataset, count, **cut, micro_batch_size=2, rank=rank, size=size, state=state, workers=rank % 3
        )
        return torch.stack([torch.cat([batch.input_ids for batch in batches]) for batches in read]), behind

    whole, _ = steps(0, 1)  # 108 samples of a blend of 84: into the second pass
    _, state = steps(1, 2, count=4)
    for size in (1, 3, 6):
        ranks = [steps(rank, size, state, 5)[0] for rank in range(size)]
        assert torch.equal(torch.cat(ranks, dim=1), whole[4:])


@pytest.mark.parametrize(
    ("name", "share", "documents"), [("train", "0.1,9.9", 0), ("validation", "39,1", 1), ("test", "8,1.95,0.05", 0)]
)
def test_a_split_without_a_sample_is_refused_with_its_figures(by_hand, name, share, documents):
    prefix = by_hand("corpus", [[1] * 16] * 40)
    with raises(EmptySplit, match=rf"{name} split of .* has {documents} documents with {16 * documents} tokens"):
        dataloader(prefix, splits_string=share).split(name)


@pytest.mark.parametrize(("known", "owner"), [({"vocab_size": 250}, "the model"), ({"tokenizer": True}, "tokenizer")])
def test_a_token_outside_the_vocabulary_is_told_with_its_place(by_hand, known, owner):
    context = replace(BYTES if "tokenizer" in known else CONTEXT, vocab_size=known.get("vocab_size"))
    prefix = by_hand("corpus", [[1] * 20, [1] * 9 + [259] + [1] * 10])
    rows = train(prefix, context)
    with raises(TokenOutsideVocabulary, match=rf"sequence 1 holds the token 259; the {owner}|{owner}"):
        inputs(rows)


def test_a_negative_token_is_told(by_hand):
    with raises(TokenOutsideVocabulary, match="token -3"):
        inputs(train(by_hand("corpus", [[1] * 9 + [-3] * 9], code=4), BYTES))


def test_data_of_another_tokenizer_are_refused(corpus):
    note = Provenance(tokenizer="x", fingerprint="byte-0", vocab_size=259, eod_id=257)
    provenance_path(corpus).write_text(note.text())
    with raises(OtherTokenizer, match=r"fingerprint is byte-0, that of data\.tokenizer byte-1"):
        train(corpus, BYTES)
    provenance_path(corpus).write_text(replace(note, vocab_size=50257).text())
    with raises(OtherTokenizer, match=r"vocabulary is 50257, that of data\.tokenizer 259"):
        train(corpus, BYTES)
    assert train(corpus)
    provenance_path(corpus).write_text(replace(note, fingerprint="byte-1").text())
    assert train(corpus, BYTES)
    unsound = note.text().replace("50257", '"many"').replace("259", '"many"')
    for text in ("{'not': 'ours'}", "[" * 100_000, unsound):
        provenance_path(corpus).write_text(text)
        assert train(corpus, BYTES)


def test_end_tokens_cannot_be_masked_where_nobody_knows_them(corpus):
    with raises(EndOfDocumentUnknown, match=r"data\.eod_mask_loss"):
        dataloader(corpus, eod_mask_loss=True)


@pytest.fixture(scope="module")
def recipe():
    """The recipe ``gpt-tiny`` as a tree without the keys of its own data."""
    tree = config.load("recipe:gpt-tiny").to_dict()
    tree["data"] = {key: tree["data"][key] for key in ("global_batch_size", "micro_batch_size", "seq_length")}
    tree["data"]["name"] = "megatron-data"
    return tree


def checked(recipe, *overrides):
    return [problem.row() for problem in config.check(recipe, overrides, kernel=Kernel.start())]


@pytest.mark.parametrize(
    "prefix",
    [
        "/d/x",
        "[/d/x]",
        "[0.3, /d/x, 0.7, /d/y]",
        "[1, /d/x]",
        "[/d/x, /d/y]",
        "{train: [0.5, /d/x, 0.5, /d/y], validation: /d/x, test: [1.0, /d/x]}",
    ],
)
def test_every_form_of_a_prefix_is_taken(recipe, prefix):
    assert checked(recipe, f"data.data_prefix={prefix}") == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data_prefix=[0.3, /d/x, /d/y]", "take turns"),
        ("data_prefix=[/d/x, 0.3]", "take turns"),
        ("data_prefix=[0.3, 0.7, /d/x, /d/y]", "take turns"),
        ("data_prefix=[0.3]", "take turns"),
        ("data_prefix=[-1, /d/x, 2, /d/y]", "positive"),
        ("data_prefix=[0.0, /d/x, 2, /d/y]", "positive"),
        ("data_prefix=[.nan, /d/x, 2, /d/y]", "a number"),
        ("data_prefix=[1e-9, /d/x, 2, /d/y]", "less than"),
        ("data_prefix=[]", "no prefix"),
        ("data_prefix={}", "no prefix"),
        ("data_prefix={valid: /d/x}", "'valid' is not a split"),
        ("data_prefix={train: [0.1]}", "train: weights"),
        ("data_prefix=3", "a path"),
        ("splits_string=a,b,c", "not a list of up to three shares"),
        ("splits_string='0,0,0'", "not a list of up to three shares"),
        ("splits_string='1,2,3,4'", "not a list of up to three shares"),
        ("splits_string='1,-2,3'", "not a list of up to three shares"),
    ],
)
def test_what_cannot_work_is_a_finding(recipe, override, said):
    beside = [] if override.startswith("data_prefix") else ["data.data_prefix=/d/x"]
    found = checked(recipe, *beside, f"data.{override}")
    assert any(said in row for row in found), found


def test_relative_prefixes_start_at_the_file_that_names_them(recipe, tmp_path):
    import yaml

    recipe = {**recipe, "data": {**recipe["data"], "data_prefix": {"train": [0.5, "a/x", 0.5, "y"]}}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(recipe))
    section = config.load(tmp_path / "run.yaml").selected("dataset").config
    assert section.data_prefix == {"train": (0.5, tmp_path / "a/x", 0.5, tmp_path / "y")}
