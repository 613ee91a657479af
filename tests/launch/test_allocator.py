"""``trainer.expandable_segments``: what the allocator of a rank is configured with, as torch has read it."""

import json
import os

import pytest

from nxdt_core.config.schema import TrainerConfig
from nxdt_core.distributed.devices import CUDA, configure_allocator
from tests.launch.launching import finish, start, words

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"

RECORDER = """
import json
import os
from dataclasses import replace

import torch

from nxdt_core.api import Callback, Component, hookimpl
from nxdt_core.distributed.devices import CPU, CUDA

HOST = replace(CPU, allocator_variables=CUDA.allocator_variables)
AT_IMPORT = {name: os.environ[name] for name in CUDA.allocator_variables if name in os.environ}


class Recorder(Callback):
    def __init__(self, config, run_dir):
        self.file = run_dir / f"allocator-{os.environ.get('RANK', 0)}.json"

    def on_fit_start(self, run):
        settings = torch._C._accelerator_getAllocatorSettings()
        self.file.write_text(json.dumps({"at_import": AT_IMPORT, "settings": settings}))


@hookimpl
def nxdt_callbacks():
    return [Component(name="recorder", target="recorder:Recorder", summary="Records the allocator.")]
"""

PROFILE = """

@hookimpl
def nxdt_devices():
    return [Component(name="cpu", target="recorder:HOST", summary="With a configurable allocator.")]
"""


@pytest.fixture
def recorded(tmp_path):
    """Train two steps; returns what each rank recorded, and what the run printed."""

    def run(*overrides, configurable=True, **variables):
        plugin = tmp_path / "recorder.py"
        plugin.write_text(RECORDER + (PROFILE if configurable else ""))
        named = (f"plugins.local=[{plugin}]", "trainer.callbacks=[recorder]", "name=run", "trainer.max_steps=1")
        named += ("plugins.prefer=[recorder]",) if configurable else ()
        process = start(words(tmp_path, *named, *overrides), PYTHONPATH=str(tmp_path), **variables)
        status, _, err = finish(process)
        assert status == 0, err
        return [json.loads(file.read_text()) for file in sorted((tmp_path / "run").glob("allocator-*.json"))], err

    return run


@pytest.mark.slow
def test_ranks_are_started_with_expandable_segments_where_the_profile_has_them(recorded):
    ranks, err = recorded("trainer.devices=2")
    assert ranks == [{"at_import": {VARIABLES[0]: EXPANDABLE}, "settings": EXPANDABLE}] * 2
    assert "expandable_segments" not in err


@pytest.mark.parametrize(("value", "settings"), [("null", EXPANDABLE), ("false", "")])
def test_one_process_has_what_the_key_says(recorded, value, settings):
    (rank,), err = recorded(f"trainer.expandable_segments={value}")
    assert rank == {"at_import": {}, "settings": settings}
    assert "expandable_segments" not in err


@pytest.mark.slow
def test_the_users_variable_takes_precedence_over_the_key(recorded):
    mine = "max_split_size_mb:128"
    (rank,), err = recorded("trainer.expandable_segments=true", **{VARIABLES[0]: mine})
    assert rank == {"at_import": {VARIABLES[0]: mine}, "settings": mine}
    assert f"note: trainer.expandable_segments=true has no effect: {VARIABLES[0]} is set to '{mine}'" in err


@pytest.mark.parametrize("name", VARIABLES)
def test_either_of_the_users_variables_is_left_as_it_is(monkeypatch, name):
    for each in VARIABLES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:128")
    configure_allocator(TrainerConfig(max_steps=1), CUDA)
    assert {each: os.environ[each] for each in VARIABLES if each in os.environ} == {name: "max_split_size_mb:128"}


def test_a_device_without_such_an_allocator_says_so(recorded):
    (rank,), err = recorded("trainer.expandable_segments=true", configurable=False)
    assert rank == {"at_import": {}, "settings": ""}
    assert "note: trainer.expandable_segments has no effect" in err
