"""The section and its translation from and to Hugging Face."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
from nxdt_plugin_llama.config import LlamaConfig, RopeScalingConfig

from nxdt_core.errors.models import HFFileDamaged, HFUnsupported

SIZES = {"num_layers": 2, "hidden_size": 48, "ffn_hidden_size": 80, "num_attention_heads": 4, "vocab_size": 96}

# The config.json of Llama 3.1 8B, as released, without ids of tokens.
LLAMA_31 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"hidden_size": 50}, "hidden_size", "multiple of num_attention_heads (4)"),
        ({"head_dim": 7}, "head_dim", "even"),
        ({"hidden_size": 12}, "head_dim", "not 3"),
        ({"num_kv_heads": 3}, "num_kv_heads", "divide num_attention_heads (4)"),
        ({"rope_theta": 0.0}, "rope_theta", "above 0"),
        ({"rope_scaling": RopeScalingConfig()}, "rope_scaling.rope_type", "missing"),
        ({"rope_scaling": RopeScalingConfig(rope_type="linear")}, "rope_scaling.factor", "needed by rope_type"),
        ({"rope_scaling": RopeScalingConfig(type="linear", factor=-1.0)}, "rope_scaling.factor", "above 0"),
        (
            {"rope_scaling": RopeScalingConfig(rope_type="linear", type="llama3", factor=2.0)},
            "rope_scaling.type",
            "older spelling",
        ),
        (
            {
                "rope_scaling": RopeScalingConfig(
                    rope_type="llama3",
                    factor=8.0,
                    low_freq_factor=4.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=64,
                )
            },
            "rope_scaling.high_freq_factor",
            "above low_freq_factor (4)",
        ),
    ],
)
def test_what_cannot_work_is_told_by_key(changes, key, words):
    problems = dict(LlamaConfig(**{**SIZES, **changes}).check())
    assert list(problems) == [key]
    assert words in problems[key]


@pytest.mark.parametrize(
    ("rope", "key", "words"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings", "needed by rope_type 'yarn'"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8, "beta_fast": 0.0}, "beta_fast", "above 0"),
        (
            {
                **{"rope_type": "longrope", "original_max_position_embeddings": 1},
                **{"short_factor": (1.0,) * 6, "long_factor": (2.0,) * 6},
            },
            "original_max_position_embeddings",
            "above 1",
        ),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 8, "short_factor": (1.0,) * 6},
            "long_factor",
            "needed",
        ),
        (
            {
                **{"rope_type": "longrope", "original_max_position_embeddings": 8},
                **{"short_factor": (1.0,) * 6, "long_factor": (2.0,) * 5},
            },
            "long_factor",
            "must have 6 numbers",
        ),
        (
            {
                **{"rope_type": "longrope", "original_max_position_embeddings": 8},
                **{"short_factor": (1.0,) * 5 + (-1.0,), "long_factor": (2.0,) * 6},
            },
            "short_factor",
            "above 0",
        ),
    ],
)
def test_a_scaling_that_cannot_work_is_told_by_key(rope, key, words):
    problems = dict(LlamaConfig(**SIZES, rope_scaling=RopeScalingConfig(**rope)).check())
    assert list(problems) == [f"rope_scaling.{key}"]
    assert words in problems[f"rope_scaling.{key}"]


@pytest.mark.parametrize(
    ("changes", "kind"), [({"rope_theta": 1.0}, "yarn"), ({"head_dim": 2}, "dynamic")], ids=["yarn", "dynamic"]
)
def test_a_scaling_needs_a_base_and_channels_that_it_is_defined_for(changes, kind):
    scaling = RopeScalingConfig(rope_type=kind, factor=2.0, original_max_position_embeddings=8)
    assert dict(LlamaConfig(**{**SIZES, **changes}, rope_scaling=scaling).check()).keys() == {"rope_scaling.rope_type"}


def test_what_works_is_not_complained_about():
    for changes in ({}, {"num_kv_heads": 1}, {"hidden_size": 50, "head_dim": 6}):
        assert not list(LlamaConfig(**{**SIZES, **changes}).check())


def test_llama_3_1_is_read():
    assert LlamaConfig.from_hf(LLAMA_31) == {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_kv_heads": 8,
        "head_dim": None,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA_31["rope_scaling"],
        "attention_bias": False,
        "mlp_bias": False,
        "layernorm_epsilon": 1e-5,
        "share_embeddings_and_output_weights": False,
        "init_method_std": 0.02,
        "use_scaled_init_method": False,
    }


RELEASED = {
    # layers, hidden, feed-forward, heads, key and value heads, vocabulary, tied, weights
    "Llama 2 7B": (32, 4096, 11008, 32, 32, 32000, False, 6_738_415_616),
    "Llama 2 13B": (40, 5120, 13824, 40, 40, 32000, False, 13_015_864_320),
    "Llama 2 70B": (80, 8192, 28672, 64, 8, 32000, False, 68_976_648_192),
    "Llama 3.1 405B": (126, 16384, 53248, 128, 8, 128256, False, 405_853_388_800),
    "Llama 3.2 1B": (16, 2048, 8192, 32, 8, 128256, True, 1_235_814_400),
    "Llama 3.2 3B": (28, 3072, 8192, 24, 8, 128256, True, 3_212_749_824),
    "Llama 3.3 70B": (80, 8192, 28672, 64, 8, 128256, False, 70_553_706_496),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes_have_as_many_weights_as_released(name):
    import torch
    from nxdt_plugin_llama.builder import LlamaBuilder

    layers, hidden, ffn, heads, kv_heads, vocab, tied, weights = RELEASED[name]
    changes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "vocab_size": vocab}
    changes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    keys = LlamaConfig.from_hf(LLAMA_31 | changes)
    keys["rope_scaling"] = RopeScalingConfig(**keys["rope_scaling"])
    with torch.device("meta"):
        model = LlamaBuilder(LlamaConfig(**keys)).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == weights


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_of_released_scalings_are_those_of_transformers(factor):
    """8 of Llama 3.1 and 3.3, 32 of 3.2, over the whole context."""
    import torch

    transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from nxdt_core.models.rotary import RotaryEmbedding

    scaling = {**LLAMA_31["rope_scaling"], "factor": factor}
    config = transformers.LlamaConfig(**{**LLAMA_31, "rope_scaling": dict(scaling)})  # which it adds to
    ours = RotaryEmbedding(128, theta=500_000.0, scaling=RopeScalingConfig(**scaling))
    torch.testing.assert_close(ours.frequency, LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0)


def test_both_spellings_of_the_rotary_embedding_are_read():
    old = {**LLAMA_31, "rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {key: value for key, value in LLAMA_31.items() if not key.startswith("rope")}
    new["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}
    assert LlamaConfig.from_hf(old) == LlamaConfig.from_hf(new)
    assert LlamaConfig.from_hf(old)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


_ADDED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_scaling": _ADDED, "rope_theta": 99.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_scaling": _ADDED},
        {"rope_scaling": _ADDED, "rope_theta": 77.0, _ORIGINAL: 64},
        {"rope_parameters": {**_ADDED, _ORIGINAL: 64, "rope_theta": 77.0}, _ORIGINAL: 512},
    ],
    ids=["scaling added", "base left out", "original context outside", "original context twice"],
)
def test_a_file_that_was_edited_to_extend_the_context_means_what_it_means_to_transformers(rope):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
    file = {**{key: value for key, value in LLAMA_31.items() if not key.startswith("rope")}, **rope}
    keys = LlamaConfig.from_hf(copy.deepcopy(file))
    theirs = transformers.LlamaConfig(**copy.deepcopy(file))
    transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)  # which moves keys to where it reads them
    assert {**keys["rope_scaling"], "rope_theta": keys["rope_theta"]} == theirs.rope_parameters


def test_what_a_file_leaves_out_is_what_transformers_takes():
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    keys = LlamaConfig.from_hf({key: LLAMA_31[key] for key in sizes})
    assert keys["rope_theta"] == 10_000.0
    assert keys["layernorm_epsilon"] == 1e-6
    assert keys["num_kv_heads"] is None
    assert keys["max_position_embeddings"] == 2048


@pytest.mark.parametrize(
    "feature",
    [
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.1},
        {"quantization_config": {"quant_method": "fp8"}},
        {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
        {"rope_scaling": {"type": "su", "factor": 2.0}},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
    ],
    ids=str,
)
def test_features_that_are_not_implemented_are_refused(feature):
    with pytest.raises(HFUnsupported) as caught:
        LlamaConfig.from_hf({**LLAMA_31, **feature})
    assert caught.value.code == "NXDT-M012"
    assert ("model.dequantize()" in caught.value.do()) == ("quantization_config" in feature)


def test_a_file_without_a_size_is_refused():
    with pytest.raises(HFFileDamaged, match="vocab_size"):
        LlamaConfig.from_hf({key: value for key, value in LLAMA_31.items() if key != "vocab_size"})


def test_the_section_and_the_entry_module_need_no_torch():
    program = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import nxdt_plugin_llama.config"
    subprocess.run([sys.executable, "-c", program], check=True)
