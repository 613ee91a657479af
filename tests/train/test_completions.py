"""Text of generated tokens, by every kind of tokenizer: what decoding prompt and tokens together adds to the prompt."""

from __future__ import annotations

import base64
import json
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.data.tokenizers.config import (
    HuggingFaceTokenizerConfig,
    SentencePieceTokenizerConfig,
    TiktokenTokenizerConfig,
)
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from nxdt_core.data.tokenizers.sentencepiece import SentencePieceTokenizer
from nxdt_core.data.tokenizers.tiktoken import TiktokenTokenizer
from nxdt_core.protocols.parallel_model import CacheUnsupported
from nxdt_core.train.sampling import Sampling, Writer, completion

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
pytest.importorskip("tiktoken", reason="tiktoken is not installed")

LINES = [
    "The quick brown fox jumps over the lazy dog, and 12345 is a number.\n",
    "café naïve – 東京 🙂  two  spaces\t;",
] * 20
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{number:02X}>" for number in range(256)]


def of_file(tokenizer, where):
    """The tokenizer of a ``tokenizer.json``."""
    tokenizer.save(str(where / "tokenizer.json"))
    return HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=where / "tokenizer.json"))


def byte_level(where):
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(LINES, tokenizers.trainers.BpeTrainer(vocab_size=320, **options))
    return of_file(bpe, where)


def byte_fallback(where):
    """As the files of Llama 2 and Mistral 7B."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    options = {"special_tokens": [*SPECIAL, *BYTES], "show_progress": False}
    bpe.train_from_iterator(LINES[:1], tokenizers.trainers.BpeTrainer(vocab_size=330, **options))
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    content = json.loads(bpe.to_str())
    content["pre_tokenizer"] = None
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in SPECIAL]
    return of_file(tokenizers.Tokenizer.from_str(json.dumps(content)), where)


def unigram(where):
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    options = {"special_tokens": SPECIAL, "unk_token": "<unk>", "show_progress": False}
    made.train_from_iterator(LINES, tokenizers.trainers.UnigramTrainer(vocab_size=90, **options))
    return of_file(made, where)


def word_piece(where):
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    options = {"special_tokens": SPECIAL, "show_progress": False}
    made.train_from_iterator(LINES, tokenizers.trainers.WordPieceTrainer(vocab_size=120, **options))
    return of_file(made, where)


def sentence_piece(where, **options):
    model = {"model_type": "unigram", "vocab_size": 340, "byte_fallback": True, "hard_vocab_limit": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_prefix=str(where / "trained"), num_threads=1, minloglevel=2, **model
    )
    return SentencePieceTokenizer(SentencePieceTokenizerConfig(model=where / "trained.model"))


def sentence_piece_bpe(where):
    unchanged = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    return sentence_piece(where, model_type="bpe", **unchanged)


def tik_token(where):
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the", b"in", "東".encode(), b"a\xc3", b"\xa9e"]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (where / "tokenizer.model").write_text("".join(lines))
    return TiktokenTokenizer(TiktokenTokenizerConfig(model=where / "tokenizer.model"))


KINDS = {
    "byte": lambda where: ByteTokenizer(),
    "byte-level BPE": byte_level,
    "BPE with byte fallback": byte_fallback,
    "unigram": unigram,
    "WordPiece": word_piece,
    "SentencePiece unigram": sentence_piece,
    "SentencePiece BPE": sentence_piece_bpe,
    "tiktoken": tik_token,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    made = KINDS[request.param](tmp_path_factory.mktemp("tokenizer"))
    made.has_byte_fallback = request.param == "BPE with byte fallback"
    return made


class Scripted:
    """A model that writes these tokens behind a prompt of ``before``."""

    def __init__(self, ids, before):
        self.ids, self.before = ids, before

    def forward(self, given):
        return torch.nn.functional.one_hot(torch.tensor([[self.ids[given.shape[1] - self.before]]]), 1_000).float()

    writing = nullcontext

    def decoding(self, lengths, columns):
        raise CacheUnsupported("it keeps none")


@given(
    begin=st.sampled_from(["a", "hello", "ends in a space ", "The quick 東京", "x\n", "é"]),
    numbers=st.lists(st.integers(0, 999), max_size=6),
    end=st.sampled_from(["", "hello world", " a  b", "京都 x", "é ü", "🙂🙂"]),
)
@settings(deadline=None, max_examples=60)
def test_prompt_and_completion_are_the_decoded_whole_and_every_way_gives_the_same(tokenizer, begin, numbers, end):
    prompt, ids = tokenizer.encode(begin), [number % tokenizer.vocab_size for number in numbers]
    ids = [*ids, *tokenizer.encode(end), *ids]
    text, whole = completion(tokenizer, prompt, ids), tokenizer.decode([*prompt, *ids])
    # The decoder of byte fallback replaces all bytes of a run, those of earlier characters too, where one is invalid.
    rewritten = "\ufffd" in whole and not whole.startswith(tokenizer.decode(prompt) + text)
    assert tokenizer.decode(prompt) + text == whole or (rewritten and tokenizer.has_byte_fallback)
    if ids:
        writer = Writer(model=Scripted(ids, len(prompt)), tokenizer=tokenizer, window=1_000, stop_ids=())
        sampling = Sampling(max_new_tokens=len(ids))
        assert "".join(writer.pieces(prompt, sampling)) == text
        assert [*writer.texts([prompt], sampling)] == [[text]]


def test_the_first_space_of_a_completion_is_there(tmp_path):
    tokenizer = byte_fallback(tmp_path)
    assert completion(tokenizer, tokenizer.encode("quick"), 2 * tokenizer.encode("fox")) == " fox fox"


def test_letters_before_half_a_character_are_there(tmp_path):
    tokenizer = tik_token(tmp_path)
    (half,) = (id_ for id_ in range(tokenizer.vocab_size) if tokenizer.decode([id_]) == "a\ufffd")
    assert completion(tokenizer, tokenizer.encode("x"), [half, half]) == "a\ufffda\ufffd"
