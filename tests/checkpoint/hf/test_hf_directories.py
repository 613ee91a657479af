"""Hugging Face directories through the key map of a toy architecture: every transform, and every way to be broken."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nxdt_testing.errors import raises
from safetensors.torch import load_file, save_file
from torch import nn

from nxdt_core.errors.checkpoints import WeightsPickled
from nxdt_core.errors.models import (
    HFExchangeUnsupported,
    HFFileDamaged,
    HFFileMissing,
    HFNotWritable,
    KeyMapIncomplete,
    WeightsDoNotFit,
    WeightsUnusable,
)
from nxdt_core.hf.directory import iterate_hf, load_hf, read_hf_config, save_hf
from nxdt_core.hf.key_map import Source
from nxdt_core.protocols.model import KeyMap, ModelBuilder
from nxdt_core.protocols.plan import ParallelPlan

KEY_MAP = (
    KeyMap(name="embed.weight", hf_names=("wte.weight",)),
    KeyMap(name="layers.*.dense.weight", hf_names=("h.*.dense.weight",), transform="transpose"),
    KeyMap(name="layers.*.qkv.weight", hf_names=("h.*.q.weight", "h.*.kv.weight"), transform="concat", sections=(4, 2)),
    KeyMap(name="layers.*.experts", hf_names=("h.*.experts.*.w",), transform="stack"),
    KeyMap(name="layers.*.down", hf_names=("h.*.down",), transform="transpose"),
    KeyMap(name="layers.*.gate", hf_names=("h.*.gate_up",), transform="part", sections=(0, 2, 0)),
    KeyMap(name="layers.*.up", hf_names=("h.*.gate_up",), transform="part", sections=(1, 2, 0)),
    KeyMap(name="layers.*.even", hf_names=("h.*.both",), transform="part_transpose", sections=(0, 2, 1)),
    KeyMap(name="layers.*.odd", hf_names=("h.*.both",), transform="part_transpose", sections=(1, 2, 1)),
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 3, bias=False)
        self.qkv = nn.Linear(4, 6, bias=False)
        self.experts = nn.Parameter(torch.randn(5, 2, 4))
        self.down = nn.Parameter(torch.randn(5, 4, 2))
        for name in ("gate", "up", "even", "odd"):
            self.register_parameter(name, nn.Parameter(torch.randn(5, 2, 4)))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleDict({str(n): Layer() for n in range(12)})
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


class ToyBuilder(ModelBuilder):
    hf_architectures = ("Toy",)
    hf_ignored = ("h.*.table", "head.w")
    vocab_size, max_sequence_length = 7, None

    def __init__(self, key_map: Sequence[KeyMap] = KEY_MAP) -> None:
        self.key_map = key_map

    def build(self) -> nn.Module:
        return Toy()

    def plan(self) -> ParallelPlan:
        return ParallelPlan(tied=(("embed.weight", "head.weight"),))

    def init_rules(self) -> list:
        return []

    def flops_per_token(self, sequence_length: int) -> float:
        return 0.0

    def config_to_hf(self) -> dict:
        return {"architectures": ["Toy"]}

    def hf_key_map(self) -> Sequence[KeyMap]:
        return self.key_map


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Toy().state_dict()


@pytest.fixture
def saved(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    save_hf(tmp_path / "out", ToyBuilder(), state)
    return tmp_path / "out"


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a directory by name (``__`` for a dot); None removes one."""
    tensors = load_file(directory / "model.safetensors")
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("limit", [5_000_000_000, 300, 1], ids=["one file", "some files", "a file each"])
def test_a_model_comes_back_bit_equal(tmp_path, state, limit):
    save_hf(tmp_path / "out", ToyBuilder(), state, max_shard_bytes=limit)
    loaded = load_hf(tmp_path / "out", ToyBuilder())
    assert loaded.keys() == state.keys() - {"head.weight"}
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)
    assert all(tensor.is_contiguous() for tensor in loaded.values())


def test_names_and_layouts_are_those_of_the_map(saved, state):
    tensors = load_file(saved / "model.safetensors")
    assert torch.equal(tensors["h.11.dense.weight"], state["layers.11.dense.weight"].t())
    assert torch.equal(tensors["h.0.q.weight"], state["layers.0.qkv.weight"][:4])
    assert torch.equal(tensors["h.0.kv.weight"], state["layers.0.qkv.weight"][4:])
    assert torch.equal(tensors["h.3.experts.4.w"], state["layers.3.experts"][4])
    assert torch.equal(tensors["h.2.down"], state["layers.2.down"].mT)
    assert torch.equal(tensors["h.2.gate_up"][:, :2], state["layers.2.gate"])
    assert torch.equal(tensors["h.2.gate_up"][:, 2:], state["layers.2.up"])
    assert tensors["h.2.both"].shape == (5, 4, 4)
    assert torch.equal(tensors["h.2.both"][4, :, 0::2], state["layers.2.even"][4].T)
    assert torch.equal(tensors["h.2.both"][4, :, 1::2], state["layers.2.odd"][4].T)
    assert len(tensors) == 1 + 12 * (1 + 2 + 5 + 1 + 2)


def test_files_stay_below_the_limit_and_the_index_names_each_tensor_once(tmp_path, state):
    save_hf(tmp_path / "out", ToyBuilder(), state, max_shard_bytes=400)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in files.values() for t in tensors.values())
    assert all(sum(t.nbytes for t in tensors.values()) <= 400 for tensors in files.values())


def test_the_dtype_of_the_file_is_kept(tmp_path, state):
    save_hf(tmp_path / "out", ToyBuilder(), {name: value.bfloat16() for name, value in state.items()})
    assert {value.dtype for value in load_hf(tmp_path / "out", ToyBuilder()).values()} == {torch.bfloat16}
    assert read_hf_config(tmp_path / "out")["torch_dtype"] == "bfloat16"


def test_special_ids_come_from_the_tokenizer(tmp_path, state):
    tokenizer = SimpleNamespace(bos_id=3, eos_id=4, pad_id=None, vocab_size=5)
    save_hf(tmp_path / "out", ToyBuilder(), state, tokenizer)
    config = read_hf_config(tmp_path / "out")
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (3, 4, None)
    assert config["architectures"] == ["Toy"]


def test_tensors_that_the_builder_ignores_may_be_there(saved):
    rewrite(saved, h__3__table=torch.zeros(2))
    assert "embed.weight" in load_hf(saved, ToyBuilder())


def test_a_head_of_its_own_is_not_dropped_where_the_model_ties_it(saved, state):
    rewrite(saved, head__w=state["embed.weight"].clone())
    assert "embed.weight" in load_hf(saved, ToyBuilder())
    rewrite(saved, head__w=state["embed.weight"] + 1)
    with pytest.raises(WeightsUnusable, match=r"head\.w.*it is not 'wte\.weight'") as caught:
        load_hf(saved, ToyBuilder())
    assert "Set tie_word_embeddings to false" in caught.value.do()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(2, 4, dtype=torch.int8), "it holds torch.int8"),
        (torch.full((2, 4), torch.nan), "it holds NaN or infinity"),
        (torch.ones(2, 4).index_fill(1, torch.tensor(2), -torch.inf).bfloat16(), "it holds NaN or infinity"),
        (torch.full((2, 4), torch.nan).to(torch.float8_e4m3fn), "it holds NaN or infinity"),
    ],
    ids=["integers", "nan", "infinity", "nan of 8 bits"],
)
def test_a_tensor_that_holds_no_weights_is_named(saved, value, reason):
    rewrite(saved, h__3__experts__4__w=value)
    with pytest.raises(WeightsUnusable, match=rf"'h\.3\.experts\.4\.w' in '{saved}'") as caught:
        load_hf(saved, ToyBuilder())
    assert reason in caught.value.what()


def test_weights_of_8_bits_and_empty_ones_are_weights(saved):
    rewrite(saved, wte__weight=torch.ones(7, 4).to(torch.float8_e4m3fn))
    assert load_hf(saved, ToyBuilder())["embed.weight"].dtype == torch.float8_e4m3fn
    nothing = torch.empty(0, 3)
    empty = Source(name="a", shape=(0, 3), hf_names=("a",), transform="none")
    assert empty.read(lambda name: nothing) is nothing


def test_names_are_checked_before_anything_is_read(saved):
    rewrite(saved, h__3__q__weight=None, h__4__surplus=torch.zeros(1))
    with pytest.raises(WeightsDoNotFit) as caught:
        next(iterate_hf(saved, ToyBuilder()))
    assert caught.value.missing == ["h.3.q.weight"]
    assert caught.value.extra == ["h.4.surplus"]
    assert f"The weights in '{saved}' do not fit" in caught.value.what()
    assert "download or export it again" in caught.value.do()
    assert "name=" not in caught.value.do()


def test_a_tensor_of_another_shape_is_named(saved):
    rewrite(saved, wte__weight=torch.zeros(8, 4))
    with pytest.raises(WeightsDoNotFit, match=r"wte\.weight: \(8, 4\) instead of \(7, 4\)"):
        load_hf(saved, ToyBuilder())


def test_a_truncated_file_is_named(saved):
    content = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(HFFileDamaged, match=r"model\.safetensors"):
        load_hf(saved, ToyBuilder())


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "config.json", "pytorch_model.bin"]
)
def test_a_git_lfs_pointer_is_named_with_what_fetches_the_file(saved, name):
    (saved / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    if name not in ("model.safetensors", "config.json"):
        (saved / "model.safetensors").unlink()
    with pytest.raises(
        HFFileDamaged, match=rf"{re.escape(name)}' cannot be read: it is a Git LFS pointer.*git lfs pull"
    ):
        (read_hf_config(saved) if name == "config.json" else load_hf(saved, ToyBuilder()))


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_link_within_the_directory_is_read_and_a_pipe_is_not(saved, name):
    index = {"weight_map": dict.fromkeys(load_file(saved / "model.safetensors"), "model.safetensors")}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    (saved / name).rename(saved / "elsewhere")
    (saved / name).symlink_to("elsewhere")
    load_hf(saved, ToyBuilder())
    read_hf_config(saved)
    (saved / name).unlink()
    os.mkfifo(saved / name)
    if name.endswith("index.json"):
        load_hf(saved, ToyBuilder())  # from model.safetensors, as without an index
    else:
        with raises(HFFileDamaged, HFFileMissing, match=re.escape(name)):
            (read_hf_config(saved) if name == "config.json" else load_hf(saved, ToyBuilder()))


def test_a_missing_shard_is_named(tmp_path, state):
    save_hf(tmp_path / "out", ToyBuilder(), state, max_shard_bytes=1000)
    next((tmp_path / "out").glob("model-00002-*")).unlink()
    with raises(HFFileMissing, match="model-00002-"):
        load_hf(tmp_path / "out", ToyBuilder())


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": []}'])
def test_a_bad_index_is_named(saved, content):
    (saved / "model.safetensors").rename(saved / "model-00001-of-00001.safetensors")
    (saved / "model.safetensors.index.json").write_text(content)
    with pytest.raises(HFFileDamaged, match=r"index\.json"):
        load_hf(saved, ToyBuilder())


def shards(directory, state):
    """A directory of several files: its index, and the files by name."""
    save_hf(directory, ToyBuilder(), state, max_shard_bytes=1000)
    index = directory / "model.safetensors.index.json"
    return index, json.loads(index.read_text())["weight_map"]


def test_of_two_sets_of_weights_that_is_read_which_transformers_reads(tmp_path, state):
    shards(tmp_path / "out", {name: torch.zeros_like(value) for name, value in state.items()})
    save_hf(tmp_path / "single", ToyBuilder(), state)
    (tmp_path / "single" / "model.safetensors").rename(tmp_path / "out" / "model.safetensors")
    assert torch.equal(load_hf(tmp_path / "out", ToyBuilder())["embed.weight"], state["embed.weight"])


def test_an_index_that_names_the_wrong_shard_is_told_with_the_tensor(tmp_path, state):
    index, files = shards(tmp_path / "out", state)
    name, right = "h.3.q.weight", files["h.3.q.weight"]
    wrong = next(file for file in files.values() if file != right)
    index.write_text(json.dumps({"weight_map": files | {name: wrong}}))
    with pytest.raises(HFFileDamaged) as caught:
        load_hf(tmp_path / "out", ToyBuilder())
    assert caught.value.path == str(index)
    assert caught.value.reason == f"it says that '{name}' is in '{wrong}', and that is in '{right}'"


def test_of_two_copies_of_a_tensor_that_of_the_index_counts(tmp_path, state):
    _, files = shards(tmp_path / "out", state)
    wanted = load_hf(tmp_path / "out", ToyBuilder())
    for file in set(files.values()) - {files["wte.weight"]}:
        path = tmp_path / "out" / file
        save_file(load_file(path) | {"wte.weight": torch.zeros(7, 4)}, path)
    found = load_hf(tmp_path / "out", ToyBuilder())
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


def test_an_index_cannot_name_files_elsewhere(tmp_path, saved):
    elsewhere = tmp_path / "elsewhere.safetensors"
    (saved / "model.safetensors").rename(elsewhere)
    names = dict.fromkeys(load_file(elsewhere), "../elsewhere.safetensors")
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with raises(HFFileMissing):
        load_hf(saved, ToyBuilder())


def test_pickled_weights_are_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'went off')!r}, 'w')",)

    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(HFFileDamaged):
        load_hf(tmp_path, ToyBuilder())
    (tmp_path / "model.safetensors").unlink()
    with raises(WeightsPickled, match="safetensors"):
        load_hf(tmp_path, ToyBuilder())
    assert not (tmp_path / "went off").exists()


@pytest.mark.parametrize(("content", "error"), [(None, HFFileMissing), ("{", HFFileDamaged), ("3", HFFileDamaged)])
def test_a_bad_config_is_named(tmp_path, content, error):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with raises(error, match=r"config\.json"):
        read_hf_config(tmp_path)


def test_a_directory_with_files_is_not_written_into(saved, state):
    before = (saved / "model.safetensors").read_bytes()
    with raises(HFNotWritable):
        save_hf(saved, ToyBuilder(), state)
    assert (saved / "model.safetensors").read_bytes() == before


def test_a_state_of_another_model_writes_nothing(tmp_path, state):
    wrong = {**state, "embed.weight": torch.zeros(9, 4), "surplus": torch.zeros(1)}
    del wrong["layers.2.experts"]
    with pytest.raises(WeightsDoNotFit) as caught:
        save_hf(tmp_path / "out", ToyBuilder(), wrong)
    assert (caught.value.missing, caught.value.extra) == (["layers.2.experts"], ["surplus"])
    assert not (tmp_path / "out").exists()


def test_a_tensor_without_a_parameter_is_not_dropped_in_silence(tmp_path, state):
    with pytest.raises(WeightsDoNotFit, match="surplus"):
        save_hf(tmp_path / "out", ToyBuilder(), {**state, "surplus": torch.zeros(1)})


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (None, "no entry matches"),
        (KeyMap(name="embed.weight", hf_names=("a", "b")), "takes one name"),
        (KeyMap(name="embed.weight", hf_names=("a",), transform="flip"), "no transform 'flip'"),
        (KeyMap(name="embed.weight", hf_names=("a", "b"), transform="concat", sections=(3, 3)), "add up to its 7"),
        (KeyMap(name="embed.weight", hf_names=("a", "b"), transform="concat", sections=(7,)), "add up to its 7"),
        (KeyMap(name="embed.weight", hf_names=("a",), transform="interleave", sections=(3, 2)), "(kinds, heads)"),
        (
            KeyMap(name="embed.weight", hf_names=("a",), transform="pad", sections=(8,)),
            "its 7 rows are not (8,) and padding",
        ),
        (KeyMap(name="embed.weight", hf_names=("a",), transform="part", sections=(2, 2, 0)), "(number, parts, altern"),
        (KeyMap(name="embed.weight", hf_names=("a",), transform="part", sections=(0, 2, 0)), "'a' has 2 parts, not 1"),
    ],
)
def test_a_wrong_key_map_is_the_builders_error(tmp_path, state, entry, reason):
    key_map = (*(() if entry is None else (entry,)), *KEY_MAP[1:])
    with raises(KeyMapIncomplete, match=r"'embed\.weight'") as caught:
        save_hf(tmp_path / "out", ToyBuilder(key_map), state)
    assert reason in str(caught.value)


def test_a_builder_without_a_key_map_is_refused(saved):
    class Plain(ModelBuilder):
        def build(self):
            raise AssertionError("a model was built whose parameters have no names there")

    with raises(HFExchangeUnsupported, match="Plain"):
        load_hf(saved, Plain(SimpleNamespace(vocab_size=8)))
