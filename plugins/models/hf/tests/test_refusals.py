"""Models that cannot be trained here, or not in a layout, are refused in words."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from nxdt_plugin_hf.architecture import AttentionCall, read_architecture
from nxdt_plugin_hf.builder import HFBuilder, measure_sharding
from nxdt_plugin_hf.config import HFModelConfig
from nxdt_testing.errors import raises

from nxdt_core.engine.engine import TorchEngine
from nxdt_core.errors import NxdtError
from nxdt_core.errors.layouts import LayoutRefused
from nxdt_core.errors.models import BadModelConfig

AXK1 = {"model_type": "axk1", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def made(**values):
    builder = HFBuilder(HFModelConfig(hf_config={**SIZES, **values}))
    builder.plan()
    return builder


@pytest.mark.parametrize(
    ("values", "code", "sentences"),
    [
        (
            {"model_type": "qwen33"},
            "NXDT-M081",
            ["knows no model_type 'qwen33'", "Did you mean 'qwen3'", "pip install"],
        ),
        (
            {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}},
            "NXDT-M082",
            ["modeling_mine.Mine", "never run"],
        ),
        ({"model_type": "bert"}, "NXDT-M083", ["BertLMHeadModel", "see later ones"]),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "NXDT-M083", ["BertForMaskedLM"]),
        ({"model_type": "t5"}, "NXDT-M083", ["encoder with a decoder"]),
        ({"model_type": "vit"}, "NXDT-M083", ["no causal language model"]),
        ({"model_type": "gemma3"}, "NXDT-M083", ["text model"]),
        ({"model_type": "qwen2", "hidden_size": "wide"}, "NXDT-M084", ["'hidden_size'", "expected int"]),
        ({"model_type": "qwen2", "quantization_config": {"bits": 4}}, "NXDT-M012", ["model.dequantize()"]),
        ({"model_type": "mamba"}, "NXDT-M085", ["MambaForCausalLM"]),
        (
            {"model_type": "nemotron_h"},
            "NXDT-M085",
            ["mixer.experts", "gate_up_proj and down_proj (up_proj, down_proj)"],
        ),
        ({"model_type": "llama4_text"}, "NXDT-M085", ["'model.layers.0.feed_forward.experts' are experts that do not"]),
        ({"model_type": "gpt_oss", "attention_dropout": 0.1}, "NXDT-M085", ["sinks; set attention_dropout to 0"]),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "router_jitter_noise": 0.1},
            "NXDT-M085",
            ["'model.layers.*.mlp' draws random numbers in training"],
        ),
        (
            {"model_type": "seed_oss", "residual_dropout": 0.1},
            "NXDT-M085",
            ["'model.layers.*.self_attn' draws random numbers in training", "to 0"],
        ),
        (
            {"model_type": "qwen3_next", "num_experts_per_tok": 2, "num_hidden_layers": 4},
            "NXDT-M085",
            ["only 1 of its 4 layers mix tokens by attention"],
        ),
        (
            {"model_type": "falcon_h1", "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
            "NXDT-M085",
            ["'model.layers.*.mamba", "would mix packed documents"],
        ),
        ({"model_type": "falcon"}, "NXDT-M085", ["FalconForCausalLM cannot be trained here: it computes attention"]),
        ({"model_type": "qwen2", "architectures": 5}, "NXDT-M011", ["architectures must be a list of names, and is 5"]),
        ({"model_type": "bloom", "n_head": 4}, "NXDT-M085", ["BloomForCausalLM", "attention"]),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_what_cannot_be_trained_is_refused(values, code, sentences):
    with pytest.raises(NxdtError) as caught:
        made(**values)
    assert caught.value.code == code, str(caught.value)
    for sentence in sentences:
        assert sentence in str(caught.value)


def test_code_beside_a_configuration_is_not_run_where_transformers_has_the_model(tmp_path, monkeypatch):
    (tmp_path / "modeling_mine.py").write_text("raise SystemExit('it was run')")
    monkeypatch.syspath_prepend(tmp_path)
    builder = made(model_type="qwen2", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    assert builder.architecture.model_class.__module__.startswith("transformers.")
    assert "auto_map" not in builder.config_to_hf()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_that_a_configuration_names_are_not_looked_for(key):
    """transformers downloads and runs those of ``owner/name``."""
    architecture = read_architecture({**SIZES, "model_type": "qwen3_moe", key: "someone/kernels"})
    assert "someone" not in repr(architecture.config)
    with torch.device("meta"):
        assert type(architecture.plain()).__module__.startswith("transformers.")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"num_key_value_heads": 3}, "hf_config.num_key_value_heads must divide num_attention_heads (4), and is 3"),
        ({"hidden_size": 30}, "hf_config.hidden_size must be a multiple of num_attention_heads (4), and is 30"),
    ],
)
def test_sizes_that_contradict_each_other_are_named_before_transformers_is_asked(values, problem):
    with raises(BadModelConfig, match=r"M002") as caught:
        made(model_type="qwen2", **values)
    assert problem in str(caught.value)


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(NxdtError, match="pip install 'transformers>=") as caught:
        made(model_type="qwen2")
    assert caught.value.code == "NXDT-M080"


@pytest.mark.parametrize(
    ("values", "dimension", "sentences"),
    [
        ({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2}, "tp", ["no tensor parallel plan"]),
        (
            {"model_type": "granite", "embedding_multiplier": 12.0},
            "pp",
            ["hidden states outside of its layers"],
        ),
        ({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2}, "pp", ["no pipeline plan"]),
        (AXK1, "tp", ["'model.layers.*.mlp' does more than to add up"]),
        ({"model_type": "mixtral", "output_router_logits": True}, "pp", ["routers of all layers", "=false"]),
        ({"model_type": "mixtral", "output_router_logits": True}, "cp", ["whole sequences", "=false"]),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused_with_its_reason(values, dimension, sentences):
    refused = made(**values).plan().refused
    for sentence in sentences:
        assert sentence in refused[dimension]


def test_attention_that_a_plan_leaves_whole_is_cut_only_where_all_its_parts_are_known(monkeypatch):
    from transformers import GraniteMoeForCausalLM

    built = GraniteMoeForCausalLM.__init__

    def with_gate(model, config):
        built(model, config)
        for layer in model.model.layers:
            layer.self_attn.gate = torch.nn.Linear(32, 32)

    monkeypatch.setattr(GraniteMoeForCausalLM, "__init__", with_gate)
    builder = HFBuilder(HFModelConfig(hf_config={**SIZES, "model_type": "granitemoe", "max_position_embeddings": 77}))
    assert builder.plan().refused["tp"] == "transformers has no tensor parallel plan for its layers"


def test_a_directory_whose_form_is_not_known_is_told_when_it_is_asked_for(monkeypatch):
    def reverted(model, tensors):
        return {name: tensor[:1] for name, tensor in tensors.items()}

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", reverted)
    builder = made(model_type="granitemoe", num_local_experts=4)
    with pytest.raises(NxdtError, match=r"experts\.gate_up_proj' in a form") as caught:
        builder.hf_key_map()
    assert caught.value.code == "NXDT-M086"


def test_tensor_parallelism_that_is_refused_is_an_error_in_words():
    builder = made(model_type="gpt2", n_embd=32, n_head=4, n_layer=2)
    with raises(LayoutRefused) as caught:
        measure_sharding(builder, 2, TorchEngine)
    assert str(caught.value).startswith(
        "[NXDT-P070] GPT2LMHeadModel cannot be laid out with distributed_strategy.tensor_model_parallel_size=2: "
    )


def test_dropout_is_what_it_was_but_not_beside_a_window():
    builder = made(model_type="phi3", resid_pdrop=0.1, attention_dropout=0.2, pad_token_id=None)
    call: AttentionCall = builder.facts.calls["model.layers.0.self_attn"]
    assert call.dropout == 0.2
    with torch.device("meta"):
        model = builder.build()
    assert {type(part).__module__ for part in model.modules() if "Dropout" in type(part).__name__} == {
        "nxdt_core.models.random.dropout"
    }
    with pytest.raises(NxdtError, match="set attention_dropout to 0"):
        made(model_type="phi3", attention_dropout=0.2, sliding_window=4, pad_token_id=None)


def test_infinities_are_read_and_written_as_transformers_spells_them():
    spelled = [0.0, {"__float__": "Infinity"}]
    architecture = read_architecture({"model_type": "mamba2", "time_step_limit": spelled})
    assert list(architecture.config.time_step_limit) == [0.0, float("inf")]
    assert json.loads(architecture.config.to_json_string())["time_step_limit"] == spelled
