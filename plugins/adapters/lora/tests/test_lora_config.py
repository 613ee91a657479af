"""The section, and what cannot work together."""

import pytest
from nxdt_plugin_lora.config import LoraConfig


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
    assert LoraConfig(lora_rank=16, lora_alpha=32).scaling == 2
    assert LoraConfig(lora_rank=16, lora_alpha=32, use_rslora=True).scaling == 8
