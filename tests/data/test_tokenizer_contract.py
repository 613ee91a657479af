"""Every built-in tokenizer keeps what nxdt asks of all."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from nxdt_testing.tokenizer_contract import TokenizerContract

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.data.tokenizers.config import (
    HuggingFaceTokenizerConfig,
    MegatronTokenizerConfig,
    SentencePieceTokenizerConfig,
    TiktokenTokenizerConfig,
)
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer, MegatronTokenizer
from nxdt_core.data.tokenizers.sentencepiece import SentencePieceTokenizer
from nxdt_core.data.tokenizers.tiktoken import TiktokenTokenizer

PLUGINS = Path(__file__).parents[2] / "plugins"
LINES = (PLUGINS / "datasets/text/src/nxdt_plugin_text/data/kjv.txt").read_text().splitlines()[:300]
CHATS = PLUGINS / "datasets/sft_chat/src/nxdt_plugin_sft_chat/data/tokenizer"


class TestByte(TokenizerContract):
    """Nothing of it can be configured."""

    @pytest.fixture
    def make(self):
        return ByteTokenizer


class TestHuggingFace(TokenizerContract):
    """With a chat template."""

    @pytest.fixture
    def make(self):
        return lambda: HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=CHATS))

    @pytest.fixture
    def changed(self, make):
        other = make().reserved_tokens()[-1]
        return HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=CHATS, bos_token=other))


class TestMegatron(TokenizerContract):
    """A small vocabulary in the two files of GPT-2."""

    @pytest.fixture
    def section(self, tmp_path):
        tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        options = {"special_tokens": ["<|endoftext|>", "<pad>"], "initial_alphabet": alphabet, "show_progress": False}
        bpe.train_from_iterator(LINES, tokenizers.trainers.BpeTrainer(vocab_size=300, **options))
        model = json.loads(bpe.to_str())["model"]
        vocabulary, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
        vocabulary.write_text(json.dumps(model["vocab"]))
        merges.write_text("#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in model["merges"]))
        return MegatronTokenizerConfig(vocab_file=vocabulary, merge_file=merges)

    @pytest.fixture
    def make(self, section):
        return lambda: MegatronTokenizer(section)

    @pytest.fixture
    def changed(self, section):
        return MegatronTokenizer(section.changed(eos_token="<pad>"))


class TestSentencePiece(TokenizerContract):
    """A model of merges that keeps texts as they are, so that it can be exported."""

    texts = ("In the beginning God created the heaven and the earth.", "naïve – 東京 🙂 42", "two  spaces", "a")

    @pytest.fixture
    def section(self, tmp_path):
        sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES),
            model_prefix=str(tmp_path / "trained"),
            num_threads=1,
            minloglevel=2,
            model_type="bpe",
            vocab_size=400,
            byte_fallback=True,
            pad_id=3,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
        )
        return SentencePieceTokenizerConfig(model=tmp_path / "trained.model")

    @pytest.fixture
    def make(self, section):
        return lambda: SentencePieceTokenizer(section)

    @pytest.fixture
    def changed(self, section):
        return SentencePieceTokenizer(section.changed(eos_token="<s>"))


class TestTiktoken(TokenizerContract):
    """Ranks of all bytes and of some pairs."""

    @pytest.fixture
    def section(self, tmp_path):
        pytest.importorskip("tiktoken", reason="tiktoken is not installed")
        tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"in"]
        ranks = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
        path = tmp_path / "tokenizer.model"
        path.write_text(ranks)
        return TiktokenTokenizerConfig(model=path)

    @pytest.fixture
    def make(self, section):
        return lambda: TiktokenTokenizer(section)

    @pytest.fixture
    def changed(self, section):
        return TiktokenTokenizer(section.changed(eos_token="<|begin_of_text|>"))
