"""Keys of the configuration become the variables that the Neuron runtime and compiler read."""

from __future__ import annotations

import pytest
from nxdt_plugin_nxd.library import apply_environment, variables_of

from nxdt_core.config import load

KEYS = {
    "parallel_engine.compiler_flags='--model-type transformer'": (
        "NEURON_CC_FLAGS",
        "--model-type transformer --auto-cast none",
    ),
    "compiler_cache_url=/cache": ("NEURON_COMPILE_CACHE_URL", "/cache"),
    "parallel_engine.async_exec_max_inflight_requests=7": ("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "7"),
    "parallel_engine.bucket_size_collectives=1024": ("BUCKET_CAP_MB", "1024"),
    "parallel_engine.neuron_rt_exec_timeout=100": ("NEURON_RT_EXEC_TIMEOUT", "100"),
    "trainer.lnc=2": ("NEURON_LOGICAL_NC_CONFIG", "2"),
    "precision.type=mixed_precisionSR": ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1"),
    "precision.type=autocast": ("NEURON_CC_FLAGS", "--auto-cast none --enable-mixed-precision-accumulation"),
    "parallel_engine.neuron_experimental_compress_rg=true": ("NEURON_EXPERIMENTAL_COMPRESS_RG", "1"),
    "parallel_engine.fuse_softmax=true": ("NEURON_FUSE_SOFTMAX", "1"),
}


@pytest.mark.parametrize("override", KEYS)
def test_a_key_becomes_its_variable(override: str) -> None:
    name, value = KEYS[override]
    config = load("recipe:llama-tiny", ["parallel_engine.name=nxd", override])
    assert variables_of(config)[name] == value
    assert not [note for note in config.notes if override.partition("=")[0] in note]  # none says that it has no effect


def test_without_keys_only_the_compiler_is_told_to_keep_float32() -> None:
    config = load("recipe:llama-tiny", ["parallel_engine.name=nxd"])
    assert variables_of(config) == {"NEURON_CC_FLAGS": "--auto-cast none"}


def test_switches_of_manual_precision_are_set_where_they_are_on() -> None:
    switches = "{type: manual, xla_downcast_bf16: '1', neuron_rt_stochastic_rounding_en: true, master_weights: true}"
    found = variables_of(load("recipe:llama-tiny", ["parallel_engine.name=nxd", f"precision={switches}"]))
    assert found["XLA_DOWNCAST_BF16"] == found["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "1"
    assert "XLA_USE_BF16" not in found


def test_a_variable_that_is_set_wins_but_flags_are_appended_once() -> None:
    environment = {"NEURON_RT_EXEC_TIMEOUT": "5", "NEURON_CC_FLAGS": "--cache_dir /mine"}
    asked = {"NEURON_RT_EXEC_TIMEOUT": "100", "NEURON_CC_FLAGS": "--auto-cast none"}
    for _ in range(2):
        apply_environment(asked, environment)
    assert environment == {"NEURON_RT_EXEC_TIMEOUT": "5", "NEURON_CC_FLAGS": "--cache_dir /mine --auto-cast none"}
