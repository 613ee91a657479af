"""The recipe and the configurations load, and hold what they promise."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch
from nxdt_plugin_hf.builder import HFBuilder

from nxdt_core.config import load
from tests.sampling import slow_except

CONFIGS = sorted(path.name for path in files("nxdt_plugin_hf").joinpath("configs").iterdir())


def test_the_recipe_names_a_configuration_that_comes_with_the_plugin():
    config = load("recipe:hf-tiny")
    builder = HFBuilder(config.selected("model").config)
    assert builder.architecture.name == "Qwen3ForCausalLM"
    assert config.run.data.seq_length <= builder.max_sequence_length
    assert config.run.model.optim.sched.max_steps == config.run.trainer.max_steps == 40
    assert config.run.precision.type == "fp32"
    assert not [note for note in config.notes if note.startswith("model.name")]


@pytest.mark.parametrize("name", slow_except(CONFIGS, ("gemma3-tiny", "qwen3-moe-tiny")))
def test_any_of_them_can_take_its_place(name):
    """The other tests of this folder read all of them."""
    path = f"model.model_config=package://nxdt_plugin_hf/configs/{name}"
    config = load("recipe:hf-tiny", [path, "model.hf_config.vocab_size=288"])
    builder = HFBuilder(config.selected("model").config)
    with torch.device("meta"):
        assert builder.build().lm_head.weight.shape[0] == 288


def test_a_model_without_a_name_is_of_this_plugin_where_no_other_reads_its_architecture():
    path = "model.model_config=package://nxdt_plugin_hf/configs/gemma3-tiny"
    config = load("recipe:hf-tiny", [path, "model.name=null", "model.hf_config.vocab_size=288"])
    assert config.notes[0].startswith("model.name: not given; 'hf' follows from model.model_config (")


def test_a_saved_configuration_needs_the_file_no_more():
    config = load("recipe:hf-tiny")
    saved = config.to_dict()
    saved["model"]["model_config"] = "/no/such/directory"
    assert load(saved).selected("model").config == config.selected("model").config
