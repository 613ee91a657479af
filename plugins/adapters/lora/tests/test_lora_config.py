"""The section, and what cannot work together."""

import pytest
from nxdt_plugin_lora.config import LoraConfig
from nxdt_testing.errors import raises

from nxdt_core.config import load
from nxdt_core.errors.configuration import ConfigError


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"lora_dropout": 1.0}, "lora_dropout"),
        ({"bias": "all", "lora_bias": "lora_only"}, "bias"),
        ({"target_modules": ()}, "target_modules"),
        ({"merge_lora": True, "save_lora_base": False}, "merge_lora"),
        ({"merge_lora": True, "enable_lora": False}, "merge_lora"),
        ({"load_lora_from_ckpt": True}, "load_lora_from_ckpt"),
        ({"lora_load_tag": "step-00000010"}, "lora_load_tag"),
    ],
)
def test_what_cannot_work_is_told_with_its_key(given, key):
    assert [found for found, _ in LoraConfig(**given).check()] == [key]


def test_defaults_and_the_examples_of_the_seeds_are_fine():
    assert not list(LoraConfig().check())
    assert not list(LoraConfig(lora_rank=16, lora_alpha=32, lora_dropout=0.05, bias="none").check())


def test_scaling_is_by_the_rank_or_by_its_root():
    assert LoraConfig(lora_rank=16, lora_alpha=32).scaling_of("up_proj") == 2
    assert LoraConfig(lora_rank=16, lora_alpha=32, use_rslora=True).scaling_of("up_proj") == 8


@pytest.mark.parametrize(
    ("written", "rate"),
    [
        ({"adapter": {"name": "lora"}}, 2e-4),
        ({"adapter": {"name": "lora"}, "model": {"optim": {"lr": 0.5}}}, 0.5),
        ({"adapter": {"name": "lora"}, "model": {"optim": {"name": "muon"}}}, 1e-3),
        ({"adapter": {"name": "lora"}, "objective": {"name": "dpo"}, "data": {"name": "preference"}}, 5e-6),
        ({"objective": {"name": "dpo"}, "data": {"name": "preference"}}, 1e-6),
        ({"checkpoint": {"resume_from": "base", "weight_init_only": True}, "data": {"name": "sft-chat"}}, 2e-5),
        ({"data": {"name": "sft-chat"}}, 1e-3),
    ],
)
def test_what_is_tuned_gets_a_learning_rate_that_suits_it(written, rate):
    sizes = {"seq_length": 8, "micro_batch_size": 1, "global_batch_size": 1, "tokenizer": {"library": "byte"}}
    files = {"train_files": ["*.jsonl"]} if "data" in written else {"name": "none"}
    given = {
        "name": "rates",
        "trainer": {"max_steps": 1, "accelerator": "cpu"},
        **written,
        "data": {**sizes, **files, **written.get("data", {})},
        "model": {
            "name": "hf",
            "model_config": "package://nxdt_plugin_hf/configs/qwen2-tiny",
            **written.get("model", {}),
        },
    }
    config = load(given)
    assert config.selected("optimizer").config.lr == rate


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({}, "it quantises what an adapter freezes, and adapter.name names none"),
        ({"name": "lora"}, "each rank has all codes of its layers, and distributed_strategy.zero_stage: 3 would shard"),
    ],
)
def test_what_cannot_have_a_quantised_base_is_told_with_its_key(written, reason):
    given = {
        "name": "codes",
        "trainer": {"max_steps": 1, "accelerator": "cpu", "devices": 2},
        "distributed_strategy": {"zero_stage": 3},
        "data": {"name": "none", "seq_length": 8, "micro_batch_size": 1, "global_batch_size": 2},
        "model": {"name": "hf", "model_config": "package://nxdt_plugin_hf/configs/qwen2-tiny"},
        "adapter": {"base_dtype": "nf4", **written},
    }
    with raises(ConfigError, match=f"adapter.base_dtype: {reason}"):
        load(given)
