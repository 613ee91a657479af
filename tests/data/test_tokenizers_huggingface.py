"""The Hugging Face tokenizer against the libraries themselves, on vocabularies trained here on the shipped text."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nxdt_testing.errors import raises

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from nxdt_core.data.tokens import text_ids
from nxdt_core.errors.data import (
    BadTokenizerConfig,
    BadTokenizerFile,
    TokenizerFileNotFound,
    TokenizerLibraryMissing,
)
from nxdt_core.protocols.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

TEXT = Path(__file__).parents[2] / "plugins/datasets/text/src/nxdt_plugin_text/data/kjv.txt"
LINES = TEXT.read_text().splitlines()[:1_500]


def load(**keys):
    return HuggingFaceTokenizer(HuggingFaceTokenizerConfig(**keys))


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE tokenizer whose file also asks for what training does not want."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<s>", "<pad>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(LINES, trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    bpe.enable_truncation(8)
    bpe.enable_padding(length=16, pad_id=2, pad_token="<pad>")
    return bpe


@pytest.fixture(scope="module")
def directory(trained, tmp_path_factory):
    """As ``save_pretrained`` writes one: the tokenizer and the names of its special tokens."""
    path = tmp_path_factory.mktemp("huggingface")
    trained.save(str(path / "tokenizer.json"))
    record = {
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "<pad>",
        "pad_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(record))
    (path / "special_tokens_map.json").write_text(
        json.dumps({"pad_token": "<pad>", "eos_token": {"content": "<|endoftext|>"}})
    )
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load(model=directory)


@pytest.fixture(scope="module")
def incumbent(directory):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(directory))


def test_ids_are_those_of_transformers(tokenizer, incumbent):
    assert tokenizer.vocab_size == len(incumbent) == 600
    for line in [*LINES[:200], "naïve – 東京 🙂", "<s>inside<pad>", ""]:
        expected = incumbent.encode(line, add_special_tokens=False)
        assert tokenizer.encode(line) == expected
        assert tokenizer.decode(expected) == incumbent.decode(expected, skip_special_tokens=True)


def test_texts_to_go_on_from_begin_as_those_of_transformers(tokenizer, incumbent):
    begun = incumbent("In the", padding=False, truncation=False).input_ids
    assert begun[0] == tokenizer.bos_id
    assert text_ids("In the", tokenizer) == text_ids("<s>In the", tokenizer) == begun
    assert text_ids("In", ByteTokenizer()) == [*b"In"]


def test_special_tokens_are_those_of_transformers(tokenizer, incumbent):
    assert tokenizer.bos_id == incumbent.bos_token_id == 1
    assert tokenizer.eos_id == incumbent.eos_token_id == 0
    assert tokenizer.pad_id == incumbent.pad_token_id == 2
    assert isinstance(tokenizer, Tokenizer)


def test_a_complete_new_file_makes_the_older_one_count_for_nothing(directory, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    record = json.loads((tmp_path / "tokenizer_config.json").read_text())
    added = {"2": {"content": "<pad>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**record, "added_tokens_decoder": added}))
    ours = load(model=tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (1, 2, None)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, None)


@given(st.text(max_size=40))
@settings(deadline=None)
def test_every_text_comes_back(tokenizer, text):
    assert tokenizer.spell(tokenizer.encode(text)) == text  # it may spell out a special token


@given(st.lists(st.text(max_size=30), max_size=4))
@settings(deadline=None)
def test_a_batch_equals_its_texts(tokenizer, texts):
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_truncation_padding_and_added_tokens_of_the_file_are_off(tokenizer):
    long, short = tokenizer.encode_batch([LINES[5] * 3, "a"])
    assert len(long) > 16
    assert short == tokenizer.encode("a")
    assert len(short) == 1


def test_special_and_unknown_ids_are_left_out_of_text(tokenizer):
    assert tokenizer.decode([1, *tokenizer.encode("the earth"), 0, 2, 600, -1, 10**6]) == "the earth"


def test_ways_to_name_it_agree(tokenizer, directory):
    for keys in ({"model": directory / "tokenizer.json"}, {"type": str(directory)}):
        same = load(**keys)
        assert same.fingerprint() == tokenizer.fingerprint()
        assert (same.bos_id, same.eos_id) == (1, 0)


def test_a_lone_file_has_the_special_tokens_that_the_section_names(directory, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    assert load(model=tmp_path).eos_id is None
    named = load(model=tmp_path, eos_token="<pad>", bos_token="<s>")
    assert (named.eos_id, named.bos_id) == (2, 1)
    assert named.fingerprint() != load(model=tmp_path).fingerprint()
    with raises(BadTokenizerConfig, match=r"data\.tokenizer\.eos_token: '</s>' is not in the vocabulary"):
        load(model=tmp_path, eos_token="</s>")


def test_gaps_in_the_vocabulary_count(tmp_path):
    model = tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert load(model=tmp_path).vocab_size == 10


def test_vocab_and_merge_file_make_a_byte_level_tokenizer(trained, tokenizer, tmp_path):
    trained.model.save(str(tmp_path))
    pair = {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}
    same = load(**pair)
    for line in [*LINES[:100], "naïve – 東京 🙂", "  two  spaces\n"]:
        assert same.encode(line) == tokenizer.encode(line)
        assert same.decode(same.encode(line)) == line
    assert same.eos_id == 0
    assert same.decode([0, *same.encode("x")]) == "x"
    (tmp_path / "merges.txt").write_text("nonsense")
    with raises(BadTokenizerFile, match=r"merges\.txt"):
        load(**pair)


def test_transformers_is_not_imported_for_files(directory):
    program = f"""
import sys
sys.modules["transformers"] = None
sys.modules["torch"] = None
from pathlib import Path
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
print(HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=Path({str(directory)!r}))).vocab_size)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "600\n", done.stderr


def test_a_name_is_found_in_the_cache_of_the_hub_and_else_refused(directory, tmp_path):
    """In a process of its own, because the library reads its settings when it is imported."""
    revision = tmp_path / "hub" / "models--someone--little" / "snapshots" / "0123"
    revision.mkdir(parents=True)
    (revision.parents[1] / "refs").mkdir()
    (revision.parents[1] / "refs" / "main").write_text("0123")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (revision / file).write_bytes((directory / file).read_bytes())
    program = """
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from nxdt_core.errors import NxdtError
found = HuggingFaceTokenizer(HuggingFaceTokenizerConfig(type="someone/little"))
print(found.vocab_size, found.bos_id, found.eos_id, len(found.encode("In the beginning, In the beginning")))
try:
    HuggingFaceTokenizer(HuggingFaceTokenizerConfig(type="someone/else"))
except NxdtError as error:
    print(error)
"""
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    first, *rest = done.stdout.splitlines() or [done.stderr]
    assert first == f"600 1 2 {len(load(model=directory).encode('In the beginning, In the beginning'))}", done.stderr
    assert "data.tokenizer.type: 'someone/else' is not a file or directory, nor a pretrained tokenizer" in rest[0]


def test_a_directory_of_an_older_format_is_converted(trained, tokenizer, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    trained.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    converted = load(model=tmp_path)
    assert (converted.bos_id, converted.eos_id) == (0, 0)
    for line in LINES[:50]:
        assert converted.encode(line) == tokenizer.encode(line)


def test_code_of_a_tokenizer_is_not_run_and_nobody_is_asked_whether_to(trained, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    trained.model.save(str(tmp_path))
    (tmp_path / "mine.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'RAN')!r}).touch()\n")
    named = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    asked = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    with raises(BadTokenizerFile, match="custom code"):
        load(model=tmp_path)
    assert not asked
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize("content", ["", "{}", "[1]"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with raises(BadTokenizerFile, match=r"tokenizer\.json is not a tokenizer\.json"):
        load(model=tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_git_lfs_pointer_is_named_with_what_fetches_the_file(tmp_path, directory, name):
    shutil.copytree(directory, tmp_path / "a")
    (tmp_path / "a" / name).write_text("version https://git-lfs.github.com/spec/v1")
    with raises(BadTokenizerFile, match=rf"{name} .*git lfs pull"):
        load(model=tmp_path / "a")


def test_a_damaged_file_of_special_tokens_is_refused(tmp_path, directory):
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with raises(BadTokenizerFile, match=r"tokenizer_config\.json"):
        load(model=tmp_path)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    with raises(BadTokenizerFile, match=r"directory with a tokenizer\.json"):
        load(model=tmp_path)


@pytest.mark.parametrize("key", ["model", "type"])
def test_a_missing_path_is_named_with_what_lies_nearby(directory, key):
    path = directory / "tokeniser.json"
    with raises(TokenizerFileNotFound) as caught:
        load(**{key: path if key == "model" else str(path)})
    assert f"data.tokenizer.{key}" in str(caught.value)
    assert str(directory / "tokenizer.json") in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({}, "model"),
        ({"model": Path("a"), "type": "b"}, "type"),
        ({"vocab_file": Path("v")}, "merge_file"),
        ({"merge_file": Path("m")}, "vocab_file"),
    ],
)
def test_sections_that_name_no_or_two_tokenizers_are_refused(keys, key):
    assert [found for found, _ in HuggingFaceTokenizerConfig(**keys).check()] == [key]
    with raises(BadTokenizerConfig, match=rf"data\.tokenizer\.{key}"):
        load(**keys)


@pytest.mark.parametrize("missing", ["tokenizers", "huggingface_hub", "transformers"])
def test_without_the_library_the_error_names_the_pip_command(tmp_path, missing, monkeypatch):
    name = str(tmp_path) if missing == "transformers" else "someone/little"
    monkeypatch.setitem(sys.modules, missing, None)
    with raises(TokenizerLibraryMissing, match=re.escape("pip install nxdt-core[huggingface]")) as raised:
        load(type=name)
    assert missing in str(raised.value)


def exported(tokenizer, directory):
    """The tokenizer that transformers makes of the files."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    directory.mkdir()
    for name, content in tokenizer.hf_files().items():
        (directory / name).write_bytes(content)
    return transformers.AutoTokenizer.from_pretrained(str(directory))


def test_exported_files_make_the_same_tokenizer_in_transformers(tokenizer, directory, tmp_path):
    theirs = exported(tokenizer, tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 0, 2)
    for line in LINES[:50]:
        assert theirs.encode(line, add_special_tokens=False) == tokenizer.encode(line)


def test_exported_files_have_the_special_tokens_of_the_configuration(directory, tmp_path):
    theirs = exported(load(model=directory, eos_token="<s>"), tmp_path / "out")
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<s>", "<s>", "<pad>")


def test_a_pair_of_files_is_exported_as_one(trained, tmp_path):
    trained.model.save(str(tmp_path))
    ours = load(vocab_file=tmp_path / "vocab.json", merge_file=tmp_path / "merges.txt")
    theirs = exported(ours, tmp_path / "out")
    assert theirs.eos_token_id == ours.eos_id == 0
    for line in LINES[:50]:
        assert theirs.encode(line) == ours.encode(line)


ADDED = ("<tool>", "<s>", "the lord", "<stop>")


def test_added_tokens_follow_the_vocabulary_and_only_named_ones_are_special(directory, tokenizer):
    added = load(model=directory, added_tokens=ADDED, eos_token="<stop>")
    size = tokenizer.vocab_size
    assert (added.vocab_size, added.eos_id) == (size + 3, size + 2), "<s> has an id already"
    text = "a <tool>the lord <stop>"
    ids = added.encode(text)
    assert [id_ for id_ in ids if id_ >= size] == [size, size + 1, size + 2]
    assert added.decode(ids) == "a <tool>the lord "
    assert added.spell(ids) == text
    assert "<tool>" not in added.reserved_tokens()
    assert "<stop>" in added.reserved_tokens()
    assert added.encode(LINES[3]) == tokenizer.encode(LINES[3])
    fewer = load(model=directory, added_tokens=ADDED[:3], eos_token="<s>")
    assert len({each.fingerprint() for each in (added, fewer, tokenizer)}) == 3


@pytest.mark.parametrize("pair", [False, True])
def test_exported_files_have_the_added_tokens(directory, trained, tmp_path, pair):
    trained.model.save(str(tmp_path))
    files = {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}
    ours = load(**(files if pair else {"model": directory}), added_tokens=ADDED)
    theirs = exported(ours, tmp_path / "out")
    for line in ("a <tool>the lord <stop>", "<tool><tool>", *LINES[:20]):
        assert theirs.encode(line, add_special_tokens=False) == ours.encode(line)
    again = load(model=tmp_path / "out", added_tokens=ADDED)
    assert again.vocab_size == ours.vocab_size, "a run over an export adds nothing"


@pytest.mark.parametrize("tokens", [("<a>", "<a>"), ("",)])
def test_added_tokens_that_cannot_be_are_an_error(directory, tokens):
    with raises(BadTokenizerConfig, match=r"data\.tokenizer\.added_tokens.* empty or there twice"):
        load(model=directory, added_tokens=tokens)
