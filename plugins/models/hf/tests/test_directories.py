"""Directories of transformers go in and come out."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict

import pytest
import torch
import transformers
from nxdt_plugin_hf.builder import HFBuilder
from nxdt_plugin_hf.config import HFModelConfig
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nxdt_core.errors import NxdtError
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.hf.directory import load_hf, read_hf_config, save_hf
from nxdt_core.models.rope_scaling import older_rope
from nxdt_core.train.generate import load_model
from nxdt_core.train.sampling import Sampling
from nxdt_core.train.weights.export import export_hf
from nxdt_core.train.weights.importing import import_checkpoint
from tests import processes

IDS = torch.arange(20)[None]


def saved(builder, tmp_path, dtype=torch.float32):
    """A directory that transformers wrote, and its model; no vector is alike all along."""
    torch.manual_seed(0)
    theirs = builder.architecture.model_class(builder.architecture.config).to(dtype).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.rand_like(parameter) - 0.5, alpha=0.1)
    theirs.save_pretrained(tmp_path / "in")
    return tmp_path / "in", theirs


def test_a_directory_comes_out_as_it_went_in(builder, fused, tmp_path, stored):
    directory, theirs = saved(builder(stored), tmp_path)
    made = HFBuilder(HFModelConfig(hf_config=read_hf_config(directory)))
    state = load_hf(directory, made)
    for name, weight in fused(state).items():
        assert torch.equal(weight, theirs.state_dict()[name]), name
    save_hf(tmp_path / "out", made, state)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, theirs(IDS).logits)
    mine, other = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("in", "out"))
    differ = {key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key)}
    assert differ == {"dtype", "torch_dtype", *older_rope(mine)} | ({"num_experts"} & (other.keys() - mine.keys()))


@pytest.mark.parametrize("fused_experts", ["granitemoe", "gpt-oss"])
def test_matrices_that_hold_gate_and_up_pass_a_checkpoint_unchanged(builder, tmp_path, fused_experts):
    directory, _ = saved(builder(fused_experts), tmp_path, torch.bfloat16)
    import_checkpoint(str(directory), str(tmp_path / "checkpoints"), weights_only=True)
    export_hf(str(tmp_path / "checkpoints"), str(tmp_path / "out"), max_shard_bytes=50_000)
    files = (tmp_path / "out").glob("*.safetensors")
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = load_file(directory / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor), name


def test_experts_of_four_bits_are_read_as_transformers_reads_them(builder, fused, tmp_path):
    directory, _ = saved(builder("gpt-oss", intermediate_size=64), tmp_path, torch.bfloat16)
    tensors, expected = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        packed = torch.randint(0, 256, (experts, outputs, inputs // 32, 17), dtype=torch.uint8)
        blocks, scales = packed[..., :16].contiguous(), packed[..., 16].clamp(max=250)  # beyond is infinity
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, directory / "model.safetensors")
    values = {**read_hf_config(directory), "quantization_config": {"quant_method": "mxfp4"}}
    made = HFBuilder(HFModelConfig(hf_config=values))
    state = fused(load_hf(directory, made))
    assert "quantization_config" not in made.config_to_hf()
    for name, matrices in expected.items():
        assert torch.equal(state[name], matrices), name
        assert state[name].dtype == torch.bfloat16
    assert len(expected) == 8
    save_file({**tensors, f"{name}_scales": scales[:, 1:].contiguous()}, directory / "model.safetensors")
    with pytest.raises(NxdtError, match="and its scales") as caught:
        load_hf(directory, made)
    assert caught.value.code == "NXDT-M011"


@pytest.mark.parametrize("kind", ["gpt-oss", "granitemoe"])
def test_generation_with_a_cache_writes_what_transformers_writes(builder, tmp_path, kind):
    directory, theirs = saved(builder(kind), tmp_path)
    import_checkpoint(
        str(directory), str(tmp_path / "checkpoints"), overrides=["data.tokenizer.library=byte"], weights_only=True
    )
    model = load_model(str(tmp_path / "checkpoints"))
    found = defaultdict(list)  # two texts, of which one is filled up; beyond the windows of 16
    for row, token in model.writer.tokens([IDS[0].tolist(), IDS[0, :13].tolist()], Sampling(max_new_tokens=40)):
        found[row].append(token)
    stops, surplus = [*model.stop_ids], [*range(model.tokenizer.vocab_size, 272)]
    for row, ids in enumerate((IDS, IDS[:, :13])):
        more = {"max_new_tokens": 40, "eos_token_id": stops, "suppress_tokens": surplus}
        expected = theirs.generate(ids, do_sample=False, **more)[0, ids.shape[1] :]
        assert found[row] == [token for token in expected.tolist() if token not in stops]
        assert len(found[row]) > 4


def test_the_dtype_of_exported_weights_is_theirs(builder, tmp_path):
    directory, _ = saved(builder("qwen2"), tmp_path)
    made = HFBuilder(HFModelConfig(hf_config=read_hf_config(directory)))
    state = {name: weight.bfloat16() for name, weight in load_hf(directory, made).items()}
    save_hf(tmp_path / "out", made, state)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "1 missing ('model.norm.weight')"),
        (lambda weights: weights.update(odd=torch.ones(2)), "1 unknown ('odd')"),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(7)}), "(7,) instead of (64,)"),
    ],
    ids=["missing", "extra", "another-shape"],
)
def test_weights_that_do_not_fit_are_named(builder, tmp_path, change, words):
    made = builder("qwen2")
    directory, _ = saved(made, tmp_path)
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(WeightsDoNotFit) as caught:
        load_hf(directory, made)
    assert words in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begun", "layout"),
    [
        ("gemma3", ()),
        ("qwen3-moe", ()),
        ("gpt-oss", ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2")),
    ],
)
def test_a_run_begins_with_a_directory_and_its_export_generates(builder, tmp_path, begun, layout):
    directory, theirs = saved(builder(begun, initializer_range=0.02), tmp_path)

    def nxdt(*words):
        command = [sys.executable, "-m", "nxdt_core", *map(str, words)]
        done = processes.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done

    run = ("recipe:hf-tiny", "name=directory", "model.name=null", f"model.model_config={directory}", *layout)
    begin = (
        f"checkpoint.resume_from={directory}",
        "checkpoint.weight_init_only=true",
        "trainer.val_check_interval=100",
    )
    trained = nxdt("train", *run, *begin, "trainer.max_steps=10", "model.optim.sched.max_steps=10")
    assert re.search(r"^model +hf, ", trained.stderr, re.MULTILINE)
    assert "torchao" not in trained.stderr, "its import in transformers must print no warnings"
    nxdt("checkpoint", "export", "nxdt_experiments/directory/checkpoints", "out", "--format", "hf")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert exported.generate(IDS[:, :5], min_new_tokens=4, max_new_tokens=4, do_sample=False).shape == (1, 9)
    moved = [
        (parameter - theirs.get_parameter(name)).abs().max().item() for name, parameter in exported.named_parameters()
    ]
    assert max(moved) < 0.1, "ten steps of 3e-3 from those weights, and from no others"
    assert min(moved) > 0
