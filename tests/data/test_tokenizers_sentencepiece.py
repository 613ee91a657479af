"""The SentencePiece tokenizer against the library itself, on models trained here on the shipped text."""

from __future__ import annotations

import re
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nxdt_testing.errors import raises

from nxdt_core.data.tokenizers.config import SentencePieceTokenizerConfig
from nxdt_core.data.tokenizers.sentencepiece import SentencePieceTokenizer
from nxdt_core.errors.data import BadTokenizerFile, TokenizerFileNotFound, TokenizerLibraryMissing
from nxdt_core.protocols.tokenizer import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")

TEXT = Path(__file__).parents[2] / "plugins/datasets/text/src/nxdt_plugin_text/data/kjv.txt"
LINES = TEXT.read_text().splitlines()[:1_500]


def trained(directory, **options):
    settings = {"model_type": "unigram", "vocab_size": 500, "byte_fallback": True, "pad_id": 3, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_prefix=str(directory / "trained"), num_threads=1, minloglevel=2, **settings
    )
    return directory / "trained.model"


def load(path):
    return SentencePieceTokenizer(SentencePieceTokenizerConfig(model=path))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="module")
def tokenizer(model):
    return load(model)


def test_ids_are_the_librarys(model, tokenizer):
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert tokenizer.vocab_size == library.vocab_size() == 500
    for line in LINES[:200]:
        assert tokenizer.encode(line) == library.encode(line)
        assert tokenizer.decode(tokenizer.encode(line)) == line


def test_special_tokens_are_those_of_the_model(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 3)
    assert isinstance(tokenizer, Tokenizer)


def test_special_tokens_that_the_model_lacks_are_none(tmp_path):
    bare = load(trained(tmp_path, bos_id=-1, eos_id=-1, pad_id=-1, model_type="bpe", vocab_size=400))
    assert (bare.bos_id, bare.eos_id, bare.pad_id) == (None, None, None)
    assert bare.decode(bare.encode(LINES[2])) == LINES[2]


@given(st.lists(st.text(max_size=20), max_size=4))
@settings(deadline=None)
def test_a_batch_equals_its_texts(tokenizer, texts):
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
@settings(deadline=None)
def test_located_tokens_are_the_librarys_in_their_order(tokenizer, text):
    (found,) = tokenizer.locate([text])
    assert "<" in text or found.ids.tolist() == tokenizer.encode(text)
    places = zip(found.starts, found.ends, found.starts[1:], found.ends[1:], strict=False)
    assert all(start <= next_start and end <= next_end for start, end, next_start, next_end in places)
    assert len(text) >= max(found.ends, default=0)


@given(st.text(st.characters(min_codepoint=0x3041, max_codepoint=0x9FFF, categories=["Lo"]), max_size=20))
@settings(deadline=None)
def test_scripts_that_it_never_saw_come_back_through_bytes(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFKC", text)


def test_special_and_unknown_ids_are_left_out_of_text(tokenizer):
    ids = tokenizer.encode("the earth")
    assert tokenizer.decode([1, *ids, 2, 3, 500, 10_000, -1]) == "the earth"


def test_the_fingerprint_is_the_models(model, tokenizer, tmp_path):
    assert load(model).fingerprint() == tokenizer.fingerprint()
    assert load(trained(tmp_path, vocab_size=450)).fingerprint() != tokenizer.fingerprint()


def test_a_missing_file_is_named_with_what_lies_nearby(model):
    with raises(TokenizerFileNotFound) as caught:
        load(model.with_name("traned.model"))
    assert str(model) in str(caught.value)
    with raises(TokenizerFileNotFound, match=r"data\.tokenizer\.model"):
        load(model.parent)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", ""), (b"version https://git-lfs.github.com/spec/v1\n", ".*git lfs pull"), (b"\x00" * 64, "")],
    ids=["nothing", "a pointer of Git LFS", "zeros"],
)
def test_a_file_that_is_no_model_is_refused(tmp_path, content, said):
    (tmp_path / "bad.model").write_bytes(content)
    with raises(BadTokenizerFile, match=rf"bad\.model{said}"):
        load(tmp_path / "bad.model")


def test_a_truncated_model_is_refused(tmp_path, model):
    (tmp_path / "cut.model").write_bytes(model.read_bytes()[:5_000])
    with raises(BadTokenizerFile, match=r"cut\.model"):
        load(tmp_path / "cut.model")


def test_without_the_library_the_error_names_the_pip_command(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with raises(TokenizerLibraryMissing, match=re.escape("pip install nxdt-core[sentencepiece]")):
        SentencePieceTokenizer(SentencePieceTokenizerConfig(model=model))


def test_an_exported_model_of_merges_gives_the_same_ids_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    options = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    ours = load(trained(tmp_path, **options))
    for name, content in ours.hf_files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 3)
    for line in [*LINES[:200], "naïve – 東京 🙂", "two  spaces\n\n", ""]:
        assert theirs.encode(line) == ours.encode(line)


@pytest.mark.parametrize(
    "options", [{"model_type": "unigram"}, {"model_type": "bpe", "remove_extra_whitespaces": True}]
)
def test_a_model_that_transformers_would_read_otherwise_is_not_exported(tmp_path, options):
    assert load(trained(tmp_path, **options)).hf_files() == {}
