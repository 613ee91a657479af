"""The section and its translation from and to Hugging Face."""

from __future__ import annotations

import subprocess
import sys

import pytest
from nxdt_plugin_gpt.config import GPTConfig
from nxdt_plugin_gpt.errors import NoHuggingFaceForm
from nxdt_testing.errors import raises

from nxdt_core.config import load
from nxdt_core.errors.models import HFFileDamaged, HFUnsupported
from nxdt_core.models.rope_scaling import RopeScalingConfig

SIZES = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4}
ROPE = {"position_embedding_type": "rope"}
YARN = RopeScalingConfig(rope_type="yarn", original_max_position_embeddings=16)

# As released, without ids of tokens and keys of tasks.
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}
PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu",
    "hidden_size": 512,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"hidden_size": 50}, "hidden_size", "multiple of num_attention_heads (4)"),
        ({"num_kv_heads": 3}, "num_kv_heads", "divide num_attention_heads (4)"),
        ({**ROPE, "rotary_percentage": 0.25}, "rotary_percentage", "not 3"),
        ({**ROPE, "rotary_percentage": 0.0}, "rotary_percentage", "not 0"),
        ({"rope_scaling": YARN}, "rope_scaling", "needs position_embedding_type rope"),
        ({**ROPE, "rope_scaling": YARN, "positition_interpolation_factor": 2.0}, "rope_scaling", "factor 1"),
        ({"position_freq_base": 0.0}, "position_freq_base", "above 0"),
        ({"positition_interpolation_factor": -1.0}, "positition_interpolation_factor", "above 0"),
        ({"attention_dropout": 1.0}, "attention_dropout", "below 1"),
    ],
)
def test_what_cannot_work_is_told_by_key(changes, key, words):
    problems = dict(GPTConfig(**{**SIZES, **changes}).check())
    assert list(problems) == [key]
    assert words in problems[key]


def test_what_works_is_not_complained_about():
    for changes in ({}, {"num_kv_heads": 1}, {"hidden_size": 50, "kv_channels": 7}, {**ROPE, "rotary_percentage": 0.5}):
        assert not list(GPTConfig(**{**SIZES, **changes}).check())


@pytest.mark.parametrize(("multiple", "rows"), [(1, 50257), (8, 50264), (128, 50304)])
def test_the_vocabulary_is_filled_up(multiple, rows):
    assert GPTConfig(**SIZES, make_vocab_size_divisible_by=multiple).vocab_rows == rows


def test_gpt2_is_read():
    config = GPTConfig(**GPTConfig.from_hf(GPT2))
    assert (config.num_layers, config.hidden_size, config.ffn_size, config.num_attention_heads) == (12, 768, 3072, 12)
    assert (config.activation, config.transformer_block_type, config.vocab_rows) == ("gelu_tanh", "pre_ln", 50257)
    assert (config.hidden_dropout, config.attention_dropout, config.ffn_dropout) == (0.1, 0.1, 0.0)
    assert config.share_embeddings_and_output_weights
    assert config.max_position_embeddings == 1024


def test_pythia_is_read():
    config = GPTConfig(**GPTConfig.from_hf(PYTHIA))
    assert (config.num_layers, config.hidden_size, config.ffn_size, config.num_attention_heads) == (6, 512, 2048, 8)
    assert (config.activation, config.transformer_block_type, config.rotated_size) == ("gelu", "gpt_j", 16)
    assert not config.share_embeddings_and_output_weights


def test_both_spellings_of_the_rotary_embedding_are_read():
    old = {**PYTHIA, "rotary_emb_base": 77.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {key: value for key, value in PYTHIA.items() if not key.startswith("rotary")}
    new["rope_parameters"] = {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 77.0,
        "partial_rotary_factor": 0.25,
    }
    assert GPTConfig.from_hf(old) == GPTConfig.from_hf(new)


@pytest.mark.parametrize(
    ("file", "feature"),
    [
        (GPT2, {"model_type": "opt"}),
        (GPT2, {"activation_function": "relu"}),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}),
        (GPT2, {"embd_pdrop": 0.0}),
        (PYTHIA, {"hidden_act": "silu"}),
        (PYTHIA, {"attention_bias": False}),
        (PYTHIA, {"rope_scaling": {"type": "proportional", "factor": 2.0}}),
    ],
    ids=lambda value: str(value) if len(value) == 1 else value["model_type"],
)
def test_features_that_are_not_implemented_are_refused(file, feature):
    with pytest.raises(HFUnsupported) as caught:
        GPTConfig.from_hf({**file, **feature})
    assert next(iter(feature)) in str(caught.value) or "rope_type" in str(caught.value)


def test_a_file_without_a_size_is_refused():
    with pytest.raises(HFFileDamaged, match="n_layer"):
        GPTConfig.from_hf({key: value for key, value in GPT2.items() if key != "n_layer"})


@pytest.mark.parametrize(
    "changes",
    [
        {"normalization": "rmsnorm"},
        {"activation": "swiglu"},
        {"has_bias": False},
        {"num_kv_heads": 2},
        {"kv_channels": 6},
        {"transformer_block_type": "post_ln"},
        {"transformer_block_type": "gpt_j"},
    ],
    ids=str,
)
def test_what_has_no_hugging_face_form_says_why(builder, changes):
    with raises(NoHuggingFaceForm) as caught:
        builder(**changes).config_to_hf()
    assert "GPT2LMHeadModel has no" in str(caught.value)
    assert "GPTNeoXForCausalLM has no" in str(caught.value)


def test_the_filled_up_vocabulary_is_what_tensor_parallel_ranks_divide():
    layout = ["trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2"]
    assert load("recipe:gpt-tiny", layout).run.trainer.devices == 2  # 259 ids in 272 rows
    with pytest.raises(Exception, match="make_vocab_size_divisible_by"):
        load("recipe:gpt-tiny", [*layout, "model.make_vocab_size_divisible_by=7"])


def test_the_section_and_the_entry_module_need_no_torch():
    program = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import nxdt_plugin_gpt.config"
    subprocess.run([sys.executable, "-c", program], check=True)
