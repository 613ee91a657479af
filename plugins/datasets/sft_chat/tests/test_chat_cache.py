"""Tokens of conversations are made once for all processes of a run."""

from __future__ import annotations

import numpy as np
import pytest
from nxdt_plugin_sft_chat.config import ChatConfig
from nxdt_plugin_sft_chat.loader import ChatData

from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from nxdt_core.protocols.dataset import DataContext


class Counting(HuggingFaceTokenizer):
    """A tokenizer that knows how many texts it was given."""

    def __init__(self, tokenizer):
        vars(self).update(vars(tokenizer), texts=0)

    def locate(self, texts):
        self.texts += len(texts)
        return super().locate(texts)


@pytest.fixture
def made(tokenizer, chats_file, tmp_path):
    """``made(cached, **keys)``: the training samples, and how many texts were tokenised for them."""

    def made(cached, *, seq_length=512, run="deep", **keys):
        counting = Counting(tokenizer)
        context = DataContext(
            seq_length=seq_length, seed=1, tokenizer=counting, cache_dir=tmp_path / run / "data" if cached else None
        )
        given = {"train_files": (chats_file,), "truncation": "drop", **keys}
        dataset = ChatData(ChatConfig(**given), context).split("train")
        return dataset, counting.texts

    return made


def test_the_second_process_finds_what_the_first_has_made(made):
    alone, first, second = made(False), made(True), made(True)
    assert [texts for _, texts in (alone, first, second)] == [112, 112, 0]  # and what ends a turn
    wanted, whole = alone[0].report(), alone[0]
    for dataset, _ in (first, second):
        assert dataset.fingerprint() == whole.fingerprint()
        assert len(dataset) == len(whole)
        for index in range(0, len(whole), 7):
            one, other = dataset[index], whole[index]
            assert all(np.array_equal(getattr(one, key), getattr(other, key)) for key in ("input_ids", "labels"))
        report = dataset.report()
        assert (report.by_role, report.by_turn, report.left_out) == (wanted.by_role, wanted.by_turn, wanted.left_out)
        assert (report.tokens, report.truncated) == (wanted.tokens, wanted.truncated)


@pytest.mark.parametrize("keys", [{"seq_length": 400}, {"train_turns": "last"}, {"dev_choose_samples": 90}])
def test_other_settings_find_nothing(made, keys):
    made(True)
    assert made(True, **keys)[1] > 80


def test_where_nothing_can_be_written_each_process_has_its_own(made, tmp_path, caplog):
    (tmp_path / "deep").write_text("")
    dataset, texts = made(True)
    assert (len(dataset), texts) == (len(made(False)[0]), 112)
    assert "cannot keep tokens there" in caplog.text


def test_runs_with_the_same_cache_share_tokens_up_to_its_limit(made, tmp_path, monkeypatch):
    shared = {"cache_dir": tmp_path / "shared"}
    assert [made(True, run=run, **shared)[1] for run in ("one", "two")] == [112, 0]
    assert made(True, run="three")[1] == 112
    monkeypatch.setattr(ChatConfig, "cache_bytes", 1)
    assert made(True, run="one", seq_length=400, **shared)[1] == 112
    assert made(True, run="two", seq_length=400, **shared)[1] == 0  # what is asked for stays, also above the limit
    assert made(True, run="two", **shared)[1] == 112


def test_a_limit_without_a_directory_is_named():
    config = ChatConfig(train_files=("a.jsonl",), cache_gib=1)
    assert [key for key, _ in config.check()] == ["cache_gib"]
    assert config.cache_bytes == 2**30
