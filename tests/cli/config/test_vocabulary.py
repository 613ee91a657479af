"""A tokenizer that does not fit the model is told by ``nxdt config check``, before any device is looked for."""

from __future__ import annotations

import json

import pytest

LIBRARY = "data.tokenizer.library=huggingface"


@pytest.fixture
def tokenizer(tmp_path):
    """``tokenizer(highest, **names)``: a file of two words, the second with this id, and its special tokens."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

    def make(highest, **names):
        model = tokenizers.models.WordLevel({"<end>": 0, "word": highest}, unk_token="<end>")
        tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
        return f"data.tokenizer.model={tmp_path / 'tokenizer.json'}"

    return make


def test_ids_beyond_the_models_rows_are_an_error(nxdt, tokenizer):
    done = nxdt("config", "check", "recipe:llama-tiny", LIBRARY, tokenizer(272))
    assert done.returncode == 2
    assert "NXDT-M051" in done.stderr
    assert "273 ids" in done.stderr
    assert "272 rows" in done.stderr
    again = nxdt("config", "check", "recipe:llama-tiny", LIBRARY, tokenizer(272), "model.vocab_size=288")
    assert again.returncode == 0, again.stderr


def test_padded_rows_of_a_vocabulary_count(nxdt, tokenizer):
    """GPT's 300 ids are 384 rows."""
    small = ("model.vocab_size=300", "model.make_vocab_size_divisible_by=128")
    for highest, status in ((383, 0), (384, 2)):
        done = nxdt("config", "check", "recipe:gpt-tiny", LIBRARY, tokenizer(highest), *small)
        assert done.returncode == status, done.stderr


def test_special_tokens_that_nobody_names_are_noted(nxdt, tokenizer):
    done = nxdt("config", "check", "recipe:llama-tiny", LIBRARY, tokenizer(9))
    assert "no end-of-text token; eos_token names one" in done.stderr
    assert "no padding token; pad_token names one" in done.stderr
    named = nxdt("config", "check", "recipe:llama-tiny", LIBRARY, tokenizer(9, eos_token="<end>", pad_token="word"))
    assert (named.returncode, named.stderr) == (0, "")


def test_a_file_of_another_machine_is_noted(nxdt):
    done = nxdt("config", "check", "recipe:llama-tiny", LIBRARY, "data.tokenizer.model=/elsewhere/tokenizer.json")
    assert done.returncode == 0
    assert "note: data.tokenizer: /elsewhere/tokenizer.json is not on this machine" in done.stderr
