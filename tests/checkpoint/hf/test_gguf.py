"""A GGUF file holds what transformers and the ``gguf`` package read: weights, metadata and the tokenizer."""

from __future__ import annotations

import sys

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool

from nxdt_core.cli import main
from nxdt_core.errors.checkpoints import GgufLibraryMissing, GgufUnsupported
from nxdt_core.hf.directory import load_hf
from nxdt_core.train import build
from nxdt_core.train.weights.export import export_gguf, export_hf
from tests.checkpoint.hf.exchange import llama, llama_cpp_of, save_run, write_tokenizer

gguf = pytest.importorskip("gguf", reason="gguf is not installed; it is pinned in constraints.txt")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to load files with")

LLAMA_3 = "model.rope_scaling={rope_type: llama3, factor: 4, low_freq_factor: 1, high_freq_factor: 4, " + (
    "original_max_position_embeddings: 16}"
)
MIXTRAL = ("model.name=mixtral", "model.moe.num_experts=4")
MISTRAL = ("model.name=mistral",)
WORDS = "In the beginning God created 7 heavens."
BIASES = ("model.attention_bias=true", "model.mlp_bias=true")
TOLERANCE = {"float32": 1e-6, "float16": 5e-3, "q8_0": 0.1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bpe")


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """``saved(*overrides)``: the address of a checkpoint, made once."""
    made: dict[tuple[str, ...], str] = {}

    def save(*overrides):
        if overrides not in made:
            made[overrides] = str(tmp_path_factory.mktemp("saved") / "store")
            RankPool(1, lasting=True).run(save_run, made[overrides], overrides, tokenizer, timeout_s=120)
        return made[overrides]

    return save


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        ((), "float32"),
        (("model.share_embeddings_and_output_weights=true",), "float32"),
        ((LLAMA_3,), "float32"),
        (BIASES, "float32"),
        (("model.name=qwen2",), "float32"),
        (("model.name=qwen3", "model.head_dim=128"), "float32"),
        ((), "float16"),
        ((), "q8_0"),
    ],
)
def test_transformers_computes_and_splits_the_same(saved, tmp_path, overrides, dtype):
    uri, file = saved(*overrides), tmp_path / "model.gguf"
    exported = export_gguf(uri, str(file), dtype=dtype)
    export_hf(uri, str(tmp_path / "hf"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    told = {"attention_bias": True, "mlp_bias": True} if overrides == BIASES else {}  # it does not look for them
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32, **told)
    if LLAMA_3 in overrides:  # transformers does not read the factors
        read.model.rotary_emb.inv_freq = read.model.rotary_emb.inv_freq / torch.tensor(
            tensor(file, "rope_freqs.weight")
        )
    ids = torch.arange(40, 90)[None]
    limit = TOLERANCE[dtype] * float(theirs(ids).logits.abs().max())
    torch.testing.assert_close(read(ids).logits, theirs(ids).logits, rtol=0, atol=limit)
    assert exported.size_bytes == sum(each.n_bytes for each in reader(file).tensors if each.name != "rope_freqs.weight")
    mine, other = (
        transformers.AutoTokenizer.from_pretrained(place, **more)
        for place, more in ((tmp_path / "hf", {}), (tmp_path, {"gguf_file": file.name}))
    )
    assert mine(WORDS).input_ids == other(WORDS).input_ids
    assert field(file, "tokenizer.chat_template") == "{{ messages }}"
    assert field(file, "tokenizer.ggml.pre") == "gpt-2"
    assert len(reader(file).fields["tokenizer.ggml.tokens"].data) == 304


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        *(((), "float32"), ((LLAMA_3,), "float32"), ((), "q8_0"), (MIXTRAL, "float32"), (MISTRAL, "float32")),
        *((BIASES, "float32"), (("model.name=qwen2",), "float32"), (("model.name=qwen3",), "float32")),
    ],
)
def test_llama_cpp_computes_and_splits_the_same(saved, tmp_path, overrides, dtype):
    uri, file = saved(*overrides), tmp_path / "model.gguf"
    export_gguf(uri, str(file), dtype=dtype)
    export_hf(uri, str(tmp_path / "hf"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")(WORDS, return_tensors="pt").input_ids
    expected = theirs(ids).logits[0].log_softmax(-1)
    server = llama_cpp_of(file)
    words = server.handle_completions({"prompt": WORDS, "max_tokens": 1})
    assert words["usage"]["prompt_tokens"] == ids.shape[1]
    compared = 0
    for length in range(1, ids.shape[1] + 1):
        asked = {"prompt": ids[0, :length].tolist(), "max_tokens": 1, "temperature": 0, "logprobs": 5}
        (said,) = server.handle_completions(asked)["choices"]
        if said["logprobs"] is None:  # what it wrote is a part of a character
            continue
        likeliest = said["logprobs"]["content"][0]["top_logprobs"]
        found = torch.tensor([each["logprob"] for each in likeliest])
        same = expected[length - 1][[each["id"] for each in likeliest]]
        torch.testing.assert_close(found, same, rtol=0, atol={"float32": 5e-5, "q8_0": 0.2}[dtype])
        compared += 1
    assert compared > 5


def reader(file):
    return gguf.GGUFReader(file)


def field(file, name):
    return reader(file).fields[name].contents()


def tensor(file, name):
    (found,) = (each for each in reader(file).tensors if each.name == name)
    return gguf.quants.dequantize(found.data, found.tensor_type)


def test_experts_are_stacked_and_routers_stay_float32(saved, tmp_path):
    """transformers reads no Mixtral from GGUF, so that the weights are compared one by one."""
    uri, file = saved(*MIXTRAL), tmp_path / "model.gguf"
    export_gguf(uri, str(file), dtype="float32")
    export_hf(uri, str(tmp_path / "hf"))
    config = llama(*MIXTRAL)
    weights = load_hf(tmp_path / "hf", build.model_builder(config))
    for layer in range(3):
        for ours, theirs in (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")):
            (mine,) = (value for name, value in weights.items() if f"layers.{layer}." in name and name.endswith(ours))
            found = torch.tensor(tensor(file, f"blk.{layer}.ffn_{theirs}_exps.weight"))
            assert torch.equal(found, mine)
    export_gguf(uri, str(file), dtype="q8_0")
    kinds = {each.name: each.tensor_type.name for each in reader(file).tensors}
    assert kinds["blk.0.ffn_gate_inp.weight"] == kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.0.ffn_gate_exps.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_down_exps.weight"] == "F16", "rows of 48 do not divide into blocks of 32"
    assert field(file, "llama.expert_count") == 4


def test_what_llama_cpp_does_not_run_is_refused_and_leaves_the_file(saved, tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"before")
    gpt = saved("model.name=gpt", "model.num_kv_heads=4", "model.make_vocab_size_divisible_by=16")
    with raises(GgufUnsupported):
        export_gguf(gpt, str(file))
    for overrides in (
        ("model.rope_scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 16}",),
        ("model.name=qwen2", LLAMA_3),
        ("model.name=qwen3", "model.attention_bias=true"),
    ):
        with raises(GgufUnsupported):
            export_gguf(saved(*overrides), str(file))
    with raises(GgufUnsupported):
        export_gguf(saved("data.tokenizer={library: byte}"), str(file))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with raises(GgufLibraryMissing):
        export_gguf(saved(), str(file))
    assert file.read_bytes() == b"before"


def test_the_command_writes_it_and_names_the_dtypes(saved, tmp_path, capfd):
    file = tmp_path / "model.gguf"
    assert main(["checkpoint", "export", saved(), str(file), "--format", "gguf", "--dtype", "q8_0"]) == 0
    assert str(file) in capfd.readouterr().out
    assert field(file, "general.name") == "model"
    assert main(["checkpoint", "export", saved(), str(file), "--format", "gguf", "--dtype", "bfloat16"]) == 2
    assert "float32, float16, q8_0" in capfd.readouterr().err
