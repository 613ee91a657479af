"""Biases, norms of heads, and scalings of the rotary embedding: the same numbers as transformers' models."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from nxdt_plugin_llama import nxdt_models
from nxdt_plugin_llama.builder import LlamaBuilder
from nxdt_plugin_llama.config import LlamaConfig, Qwen2Config
from nxdt_plugin_llama.hf import LLAMA
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool
from pydantic import Field

from nxdt_core.config import read
from nxdt_core.config.section import Section
from nxdt_core.config.tree import DEFAULT, Tree
from nxdt_core.errors.models import HFUnsupported, NoHFForm
from nxdt_core.hf.directory import load_hf, read_hf_config, save_hf
from nxdt_core.hf.key_map import sources
from nxdt_core.models.huggingface import HFFamily
from nxdt_core.train import build
from nxdt_core.train.step import initialize_parallel_model
from nxdt_core.train.weights.loading import find_weights

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")

TOKENS = 150
PAIRS = 8
_DRAWN = random.Random(20261127)
FACTORS = {name: [round(_DRAWN.uniform(1, top), 3) for _ in range(PAIRS)] for name, top in (("short", 2), ("long", 9))}
LONG = {"rope_type": "longrope", "short_factor": FACTORS["short"], "long_factor": FACTORS["long"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "yarn": YARN,
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.3},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "rope_theta": 500_000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "longrope": {**LONG, "original_max_position_embeddings": 64},
    "longrope-short": {**LONG, "original_max_position_embeddings": TOKENS},
    "longrope-factors": {**LONG, "original_max_position_embeddings": 64, "factor": 3.0, "attention_factor": 0.9},
}
CASES: dict[str, dict[str, Any]] = {
    **{f"llama-{name}": {"rope_parameters": rope} for name, rope in ROPES.items()},
    "llama-attention_bias": {"attention_bias": True},
    "llama-biases-yarn-tied": {
        **{"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "rope_parameters": YARN,
    },
    "mistral-yarn": {"sliding_window": 20, "rope_parameters": YARN},
    "mistral-dynamic": {"sliding_window": None, "rope_parameters": ROPES["dynamic"]},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2-yarn": {"rope_parameters": YARN},
    "qwen3": {"head_dim": 24},
    "qwen3-attention_bias-llama3": {
        "attention_bias": True,
        "rope_parameters": {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3-longrope": {"rope_parameters": ROPES["longrope"], "head_dim": 2 * PAIRS},
}


def case(name: str) -> dict[str, Any]:
    """Their configuration, with sizes drawn at random."""
    drawn, given = random.Random(name), CASES[name]
    heads = drawn.choice((2, 4, 6))
    rope = {"rope_type": "default", **given.get("rope_parameters", {})}
    return {
        "vocab_size": drawn.randint(50, 200),
        "hidden_size": heads * 2 * PAIRS,
        "intermediate_size": drawn.randint(20, 120),
        "num_hidden_layers": drawn.randint(1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": drawn.choice((heads, heads // 2, 1)),
        "max_position_embeddings": 64 if rope["rope_type"] == "dynamic" else 256,
        "rms_norm_eps": drawn.choice((1e-5, 1e-6)),
        "initializer_range": 0.1,
        **given,
        "rope_parameters": {"rope_theta": 10_000.0, **rope},
    }


def theirs_with(name: str, **changes: Any) -> torch.nn.Module:
    kind = name.partition("-")[0].title()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**case(name), **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():  # fresh norms are all ones and fresh biases zeros, which would hide swapped ones
        for path, parameter in model.named_parameters():
            if "norm" in path:
                parameter.uniform_(0.5, 1.5)
            if "bias" in path:
                parameter.normal_(std=0.3)
    return model


def builder_of(directory: Any) -> Any:
    """The builder that reads the directory, as a run with ``model.model_config`` makes it."""
    hf = read_hf_config(directory)
    component = next(each for each in nxdt_models() if set(hf["architectures"]) <= set(each.hf_architectures))
    module, _, attribute = component.config.partition(":")
    cls = getattr(__import__(module, fromlist=[attribute]), attribute)
    section = Tree({}, {(): DEFAULT})
    for key, value in cls.from_hf(hf).items():
        section.set(key, value, DEFAULT)
    config, problems = read.read_part(cls, section, "model")
    assert not problems
    module, _, attribute = component.target.partition(":")
    return getattr(__import__(module, fromlist=[attribute]), attribute)(config)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_those_of_transformers(name, tmp_path):
    theirs = theirs_with(name)
    theirs.save_pretrained(tmp_path)
    builder = builder_of(tmp_path)
    ours = builder.build()
    ours.load_state_dict(load_hf(tmp_path, builder), strict=not theirs.config.tie_word_embeddings)
    ids = torch.randint(0, theirs.config.vocab_size, (2, TOKENS))
    mine, other = ours(ids), theirs(ids, use_cache=False).logits
    assert (mine - other).abs().max() <= 1e-5
    assert other.abs().max() > 0.1
    grad = torch.randn_like(other) / other.numel() ** 0.5
    mine.backward(grad)
    other.backward(grad)
    expected = dict(theirs.named_parameters())
    compared = {name for source in sources(builder) for name in source.hf_names}
    assert compared == set(expected)
    for source in sources(builder):
        mine, other = ours.get_parameter(source.name).grad, expected[source.hf_names[0]].grad
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_directory_comes_back_bit_equal_through_our_model(name, tmp_path):
    theirs = theirs_with(name)
    theirs.save_pretrained(tmp_path / "theirs")
    builder = builder_of(tmp_path / "theirs")
    save_hf(tmp_path / "ours", builder, load_hf(tmp_path / "theirs", builder))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(theirs)
    for key in ("rope_parameters", "max_position_embeddings", "attention_bias", "mlp_bias", "tie_word_embeddings"):
        assert getattr(again.config, key, None) == getattr(theirs.config, key, None), key
    ids = torch.arange(40)[None]
    assert torch.equal(again(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope", "llama-yarn", "qwen3"])
def test_each_packed_document_is_computed_as_alone(name, tmp_path):
    """By its own length where frequencies follow from it: the others in the batch do not count."""
    theirs = theirs_with(name)
    theirs.save_pretrained(tmp_path)
    builder = builder_of(tmp_path)
    ours = builder.build()
    ours.load_state_dict(load_hf(tmp_path, builder))
    parts = [torch.randint(0, 50, (1, length)) for length in (50, 100, 64, 65, 3)]
    logits = ours(
        torch.cat(parts, 1),
        torch.cat([torch.arange(part.shape[1]) for part in parts])[None],
        torch.cat([torch.full((part.shape[1],), n) for n, part in enumerate(parts)])[None],
    )
    for part, mine in zip(parts, logits.split([part.shape[1] for part in parts], 1), strict=True):
        fresh = theirs_with(name)  # which has seen no longer text
        assert (mine - fresh(part, use_cache=False).logits).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "feature", [{"use_sliding_window": True}, {"layer_types": ["full_attention", "sliding_attention"]}], ids=str
)
def test_windows_in_some_layers_are_refused(feature):
    config = {**case("qwen2"), "num_hidden_layers": 2, **feature}
    with raises(HFUnsupported, match=next(iter(feature))):
        Qwen2Config.from_hf(config)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("qwen2", {"qk_norm": True}, "qk_norm"),
        ("qwen2", {"qkv_bias": False}, "qkv_bias"),
        ("llama-yarn", {"qkv_bias": True}, "qkv_bias"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        ("llama-yarn", {"attention_scale": 0.1}, "attention_scale"),
        ("llama-yarn", {"attention_softcap": 50.0}, "attention_softcap"),
        ("qwen3", {"logits_softcap": 30.0}, "logits_softcap"),
    ],
)
def test_what_the_architecture_of_transformers_lacks_is_not_exported(name, changes, key, tmp_path):
    theirs_with(name).config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    kind = name.partition("-")[0].title()
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [f"{kind}ForCausalLM"]}))
    builder = builder_of(tmp_path)
    with raises(NoHFForm, match=key):
        type(builder)(builder.config.model_copy(update=changes)).config_to_hf()


class Capped(Section):
    logits: float | None = None
    dropout: float = 0.0


class AcmeConfig(LlamaConfig):
    hf_family: ClassVar[HFFamily] = replace(LLAMA, without_effect=(*LLAMA.without_effect, "caps.dropout"))

    scale: float = Field(1.0, alias="residual_scale")
    qk_norm: bool = True
    caps: Capped = Field(default_factory=Capped)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"qk_norm": False}, None),
        ({"qk_norm": False, "neftune_noise_alpha": 5.0, "caps": {"dropout": 0.1}}, None),
        ({}, "model.qk_norm = True"),
        ({"qk_norm": False, "residual_scale": 0.5}, "model.residual_scale = 0.5"),
        ({"qk_norm": False, "caps": {"logits": 30.0}}, "model.caps.logits = 30.0"),
    ],
    ids=str,
)
def test_a_key_of_a_new_model_is_exported_without_effect_at_its_default_or_refused(values, key):
    """A model of another author that inherits from Llama's, and computes something else by a key of its own."""
    sizes = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2, "vocab_size": 32}
    builder = LlamaBuilder(AcmeConfig.model_validate({**sizes, **values}))
    if key is None:
        assert builder.config_to_hf()["architectures"] == ["LlamaForCausalLM"]
    else:
        with raises(NoHFForm, match=key):
            builder.config_to_hf()


LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}


def logits_of(directories: dict[str, str], strategy: dict[str, Any], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits of each directory's model on this rank."""
    found = {}
    for name, directory in directories.items():
        run = {
            **{"name": name, "exp_manager": {}, "trainer": {"max_steps": 1, "accelerator": "cpu", "devices": 2}},
            "data": {"name": "none", "seq_length": TOKENS, "global_batch_size": 2, "micro_batch_size": 1},
            "model": {"model_config": directory, "optim": {"lr": 0.0}},
            "distributed_strategy": strategy,
        }
        config = Path(directory) / f"rank-{os.getpid()}.yaml"  # ranks share the directory
        config.write_text(json.dumps(run))
        weights = find_weights(directory, config=str(config))
        engine = build.engine(weights.run)
        engine.start()
        model = initialize_parallel_model(weights.run, engine, materialise=False)
        weights.load(engine, model)
        found[name] = model.forward(ids)
        engine.shutdown()
    return found


SOME = ("llama-biases-yarn-tied", "llama-dynamic", "mistral-yarn", "qwen2-yarn", "qwen3-longrope")


@pytest.mark.parametrize("cases", [SOME, pytest.param([*CASES], marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_in_a_layout_equal_those_of_transformers(layout, cases, tmp_path):
    ids, expected = torch.randint(0, 128, (2, TOKENS - 1)), {}
    sizes = {"num_hidden_layers": 2, "vocab_size": 128, "intermediate_size": 64, "num_attention_heads": 4}
    for name in cases:
        heads = {"num_key_value_heads": 1 if "qwen" in name else 2, "hidden_size": 8 * PAIRS}
        theirs = theirs_with(name, **sizes, **heads)
        theirs.save_pretrained(tmp_path / name)
        expected[name] = theirs(ids, use_cache=False).logits
    directories = {name: str(tmp_path / name) for name in cases}
    for found in RankPool(2, lasting=True).run(logits_of, directories, LAYOUTS[layout], ids, timeout_s=200):
        for name, logits in found.items():
            assert (logits - expected[name]).abs().max() <= 1e-5, name
