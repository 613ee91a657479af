"""Every kind of directory that may come from someone else, with everything that such a directory may try."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nxdt_plugin_lora.peft_files import CONFIG, WEIGHTS
from nxdt_plugin_megatron_data.config import MegatronDataConfig
from nxdt_plugin_megatron_data.indexed_files import write_documents
from nxdt_plugin_megatron_data.loader import MegatronData
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from nxdt_core import checkpoint
from nxdt_core.checkpoint.format.file_names import manifest_key
from nxdt_core.checkpoint.format.manifest import encode_manifest
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from nxdt_core.errors import NxdtError
from nxdt_core.protocols.dataset import DataContext
from nxdt_core.system.regular_files import NotRegularFile, require_inside
from nxdt_core.train.generate import load_model
from nxdt_core.train.weights.importing import import_checkpoint
from nxdt_core.train.weights.loading import find_weights
from tests.checkpoint.poison import HF_CONFIG, little_memory, weights

__all__ = ["little_memory"]

REFERENCE = "${oc.env:HOME}"
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
SHARD, INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one of each kind."""
    root = tmp_path_factory.mktemp("foreign")
    hf = root / "model"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps({**HF_CONFIG, "head_dim": 2, "rms_norm_eps": 1e-5}))
    (hf / "generation_config.json").write_text('{"eos_token_id": 1}')
    (hf / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    (hf / "chat_template.jinja").write_text("{{ messages }}")
    vocabulary = {letter: id_ for id_, letter in enumerate("abcdefgh")}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(hf / "tokenizer.json"))
    save_file(weights(), hf / "model.safetensors")
    import_checkpoint(str(hf), str(root / "checkpoint"))
    adapter = root / "adapter"
    adapter.mkdir()
    (adapter / CONFIG).write_text(json.dumps({**ADAPTER, "base_model_name_or_path": str(hf)}))
    save_file(
        {f"{MODULE}.lora_A.weight": torch.ones(2, 8), f"{MODULE}.lora_B.weight": torch.ones(8, 2)}, adapter / WEIGHTS
    )
    shutil.copytree(hf, root / "tokenizer")
    sharded = Path(shutil.copytree(hf, root / "sharded"))
    (sharded / "model.safetensors").rename(sharded / SHARD)
    (sharded / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights(), SHARD)}))
    (root / "megatron").mkdir()
    write_documents(root / "megatron" / "corpus", np.dtype("<u2"), [[np.arange(99)]])
    (root / "gguf").mkdir()
    (root / "gguf" / "model.gguf").write_bytes(b"GGUF\3\0\0\0" + (2**62).to_bytes(8, "little") * 2)
    return root


def use_tokenizer(directory: Path) -> None:
    tokenizer = HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=directory))
    tokenizer.encode("a"), tokenizer.chat_template(), tokenizer.hf_files()


def use_megatron(directory: Path) -> None:
    config = MegatronDataConfig(data_prefix=directory / "corpus")
    split = MegatronData(config, DataContext(seq_length=8, seed=0, tokenizer=None, vocab_size=99)).split("train")
    assert len(split) == 12
    assert sorted(token for number in range(12) for token in split[number].input_ids) == list(range(96))


USES: dict[str, Callable[[Path], object]] = {
    "model": lambda path: load_model(str(path)),
    "import": lambda path: import_checkpoint(str(path), str(path.parent / "imported")),
    "adapter": lambda path: load_model(str(path)),
    "teacher": lambda path: find_weights(str(path)),
    "checkpoint": lambda path: load_model(str(path)),
    "tokenizer": use_tokenizer,
    "gguf": lambda path: load_model(str(path / "model.gguf")),
    "sharded": lambda path: load_model(str(path)),
    "megatron": use_megatron,
}
OF = {"import": "model", "teacher": "adapter"}
"""Uses that read the directory of another kind."""
FILES = {
    "model": ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    "import": ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
    "adapter": (CONFIG, WEIGHTS),
    "teacher": (CONFIG, WEIGHTS),
    "checkpoint": (manifest_key(0), "*.safetensors"),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    "gguf": ("model.gguf",),
    "sharded": (INDEX, SHARD),
    "megatron": ("corpus.idx", "corpus.bin"),
}
OPTIONAL = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", CONFIG)
"""Without these, a directory is another kind of directory, or none of a model with text."""


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copied(use: str) -> Path:
        return Path(shutil.copytree(made / OF.get(use, use), tmp_path / use, symlinks=True))

    return copied


@pytest.mark.parametrize("use", [use for use in USES if use != "gguf"])
def test_each_is_used_as_it_is(copy, use):
    USES[use](copy(use))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attack", ["link", "loop", "pipe"])
@pytest.mark.parametrize(("use", "file"), [(use, file) for use, files in FILES.items() for file in files])
def test_files_are_neither_links_out_of_the_directory_nor_pipes(copy, tmp_path, use, file, attack):
    target = next(copy(use).rglob(file))
    if attack == "link":
        target.rename(tmp_path / "of-this-machine")
        target.symlink_to(tmp_path / "of-this-machine")
    else:
        target.unlink()
        target.symlink_to(target.name) if attack == "loop" else os.mkfifo(target)
    try:
        USES[use](tmp_path / use)
    except NxdtError:
        return
    assert attack != "link" or use == "megatron"  # data may be linked
    assert attack == "link" or file in OPTIONAL  # read as a directory without it


def edited(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def forged(directory: Path, **changed: Any) -> None:
    """Give the checkpoint's own configuration other values, by dotted keys; its digest is right again."""
    storage = LocalStorage(str(directory))
    manifest = checkpoint.read_manifest(storage, 0)
    config = json.loads(json.dumps(manifest.facts.config))
    for key, value in changed.items():
        *parents, last = key.split("__")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    facts = dataclasses.replace(manifest.facts, config=config)
    (directory / manifest_key(0)).write_bytes(encode_manifest(dataclasses.replace(manifest, facts=facts)))


BASE = "base_model_name_or_path"
VALUES = [
    *(("model", "config.json", {"hidden_act": REFERENCE}, "reference"),),
    *(("model", "config.json", {"hidden_size": 10**12}, "too large"),),
    *(("model", "config.json", {"rope_theta": 1e308}, "float32"),),
    *(("model", "config.json", {"architectures": 5}, "architectures"),),
    *(("model", "config.json", {"num_hidden_layers": [1]}, "num_layers|num_hidden_layers"),),
    *((use, CONFIG, {"lora_dropout": REFERENCE}, "reference") for use in ("adapter", "teacher")),
    *((use, CONFIG, {"r": 10**9}, "r is 1000000000") for use in ("adapter", "teacher")),
    *((use, CONFIG, {"r": "x"}, "lora_rank") for use in ("adapter", "teacher")),
    *((use, CONFIG, {"lora_alpha": 1e308}, "float32") for use in ("adapter", "teacher")),
    *((use, CONFIG, {"bias": "\ud800none"}, "half a character") for use in ("adapter", "teacher")),
    *((use, CONFIG, {BASE: "."}, "an adapter itself") for use in ("adapter", "teacher")),
    *((use, CONFIG, {BASE: "x" * 5000}, "not found") for use in ("adapter", "teacher")),
    *((use, CONFIG, {BASE: ["x"]}, "not a path") for use in ("adapter", "teacher")),
    *((use, CONFIG, {"target_parameters": [5]}, "not a list of names") for use in ("adapter", "teacher")),
    ("checkpoint", None, {"model__activation": REFERENCE}, "reference"),
    ("checkpoint", None, {"model__num_layers": 10**9}, "too large"),
    ("checkpoint", None, {"model__num_layers": "x"}, "num_layers"),
    ("checkpoint", None, {"adapter": {"name": "lora", "lora_rank": 10**9}}, "do not fit"),
    ("checkpoint", None, {"adapter": {"name": "lora", "lora_alpha": 1e308}}, "float32"),
    ("checkpoint", None, {"data__tokenizer__added_tokens": [f"<{n}>" for n in range(2000)]}, "added_tokens"),
    *(
        ("sharded", INDEX, {"weight_map": names}, said)
        for names, said in (
            (5, "weight_map"),
            (["x"], "weight_map"),
            ({"lm_head.weight": 5}, "weight_map"),
            ({"lm_head.weight": "../model/model.safetensors"}, "model.safetensors"),
            ({"lm_head.weight": "/dev/zero"}, "holds no 'zero'"),
            ({"lm_head.weight": REFERENCE}, "HOME"),
            ({"lm_head.weight": INDEX}, "index.json"),
            (dict.fromkeys(weights(), "x" * 5000), "."),
        )
    ),
    ("tokenizer", "tokenizer.json", {"normalizer": {"type": "Nothing"}}, "not a tokenizer.json"),
    *(
        ("tokenizer", "tokenizer.json", {"normalizer": {"type": "Sequence", "normalizers": [part] * 3}}, "characters")
        for part in (
            {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100},
            {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a" * 100},
            {"type": "Prepend", "prepend": "a" * 100},
        )
    ),
    ("tokenizer", "tokenizer.json", {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}}, "tokenizer"),
    ("model", "tokenizer.json", {"model": {"type": "WordLevel", "vocab": {"a": 2**31}, "unk_token": "a"}}, "8 rows"),
]


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(("use", "file", "values", "said"), VALUES)
def test_values_are_refused_by_name(copy, monkeypatch, use, file, values, said):
    directory = copy(use)
    monkeypatch.chdir(directory)
    forged(directory, **values) if file is None else edited(directory / file, **values)
    with pytest.raises(NxdtError, match=said):
        USES[use](directory)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("count", [0, 1, 2**31 - 1, 2**31, 2**60, 2**62, 2**63, 2**64 - 1])
@pytest.mark.parametrize("place", [9, 18, 26, 34, 38, 46])
def test_a_forged_index_of_megatron_is_an_error(copy, place, count):
    """Its version, numbers of sequences and documents, a length, a place in the tokens and a border."""
    index = copy("megatron") / "corpus.idx"
    whole = bytearray(index.read_bytes())
    width = 4 if place == 34 else 8
    forged = (count % 2 ** (8 * width)).to_bytes(width, "little")
    if whole[place : place + width] == forged:
        pytest.skip("it has this value")
    whole[place : place + width] = forged
    index.write_bytes(whole)
    with pytest.raises(NxdtError, match="NXDT-D"):
        use_megatron(index.parent)


@pytest.mark.parametrize(("layers", "accepted"), [(("blobs", "5f"), True), (("elsewhere", "5f"), False)])
def test_a_link_of_the_hubs_cache_may_lead_to_its_blobs(tmp_path, layers, accepted):
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / "1a"
    snapshot.mkdir(parents=True)
    blob = repository.joinpath(*layers)
    blob.parent.mkdir()
    blob.write_text("{}")
    (snapshot / "config.json").symlink_to(Path("../..", *layers))
    if accepted:
        require_inside(snapshot / "config.json", snapshot)
    else:
        with pytest.raises(NotRegularFile, match="out of its directory"):
            require_inside(snapshot / "config.json", snapshot)
