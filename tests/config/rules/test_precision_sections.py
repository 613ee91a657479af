"""Precisions in the YAML: every name that is offered can be had, and switches that contradict each other cannot."""

from __future__ import annotations

import pytest

from nxdt_core.builtins import nxdt_precisions
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.train import build

THERE = "mixed_precision mixed_precisionSR mixed_precision_SR bf16SR fp32 autocast manual"
"""Spellings of NxD Training's documentation, files and code, which differ there."""
SWITCHES = "xla_use_bf16 xla_downcast_bf16 neuron_rt_stochastic_rounding_en"


def policy(load, good, section):
    return build.precision(load(good, f"precision={{{section}}}"))


@pytest.mark.parametrize("name", THERE.split())
def test_every_precision_that_nxd_training_names_is_one(load, good, name):
    assert policy(load, good, f"type: {name}").name == name.replace("n_SR", "nSR")


@pytest.mark.parametrize("name", [record.name for record in nxdt_precisions()])
def test_what_a_name_says_of_masters_and_rounding_holds(load, good, name):
    found = policy(load, good, f"type: {name}")
    assert found.name == name
    assert found.master_weights == name.startswith("mixed")
    assert found.stochastic_rounding == name.endswith("SR")
    assert (found.parameters == "bfloat16") == name.startswith(("mixed", "bf16"))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ("", "fp32"),
        ("xla_downcast_bf16: '1', master_weights: true, fp32_grad_acc: true", "mixed_precision"),
        (
            "xla_downcast_bf16: 1, master_weights: true, fp32_grad_acc: true, neuron_rt_stochastic_rounding_en: '1'",
            "mixed_precisionSR",
        ),
        ("xla_use_bf16: true, neuron_rt_stochastic_rounding_en: 1", "bf16SR"),
    ],
)
def test_switches_spell_the_named_precisions(load, good, keys, named):
    by_hand, by_name = policy(load, good, f"type: manual, {keys}"), policy(load, good, f"type: {named}")
    for part in ("parameters", "gradients", "optimizer_state", "master_weights", "stochastic_rounding"):
        assert getattr(by_hand, part) == getattr(by_name, part), part


@pytest.mark.parametrize("switch", SWITCHES.split())
@pytest.mark.parametrize("off", ["false", "0", "'0'"])
def test_a_switch_that_is_off_as_text_is_off(load, good, switch, off):
    assert policy(load, good, f"type: manual, {switch}: {off}").parameters == "float32"


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ("xla_use_bf16: 1, xla_downcast_bf16: 1", "xla_downcast_bf16"),
        ("xla_use_bf16: 1, master_weights: true", "master_weights"),
        ("xla_use_bf16: 1, fp32_grad_acc: true", "fp32_grad_acc"),
        ("master_weights: true", "master_weights"),
        ("neuron_rt_stochastic_rounding_en: '1'", "neuron_rt_stochastic_rounding_en"),
        ("xla_downcast_bf16: 1, parallel_layers_reduce_dtype: fp32", "parallel_layers_reduce_dtype"),
        ("xla_use_bf16: 'yes'", "xla_use_bf16"),
    ],
)
def test_switches_that_contradict_each_other_are_refused_by_key(load, good, keys, key):
    with pytest.raises(ConfigError, match=rf"precision\.{key}: "):
        load(good, f"precision={{type: manual, {keys}}}")
