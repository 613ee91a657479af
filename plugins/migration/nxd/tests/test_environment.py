"""Environment variables of NxD Training's job scripts: one note at the start of a run, and a table of the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nxdt_plugin_migrate.config.renamed_keys import OF_ENGINE
from nxdt_plugin_migrate.programs import VARIABLES, NxDTraining

from scripts.docs_site.nxd_keys import core_keys
from tests.sampling import slow

PAGE = (Path(__file__).parents[4] / "docs/migration.md").read_text()
RUN = ("train", "recipe:llama-tiny", "trainer.max_steps=1", "trainer.accelerator=cpu", "data.global_batch_size=4")
SET = {"XLA_USE_BF16": "1", "COMPILE": "0", "TRAIN_ITERS": "20", "NEURON_CC_FLAGS": "--model-type transformer"}


@pytest.mark.parametrize("devices", ["1", slow("2")])
def test_a_run_starts_with_one_note_on_the_variables_that_are_set(nxdt, devices):
    done = nxdt(*RUN, f"trainer.devices={devices}", **SET)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("note: environment:")] == [
        "note: environment: nxdt does not read these variables of NxD Training; what has their effect here: "
        "COMPILE: trainer.fast_dev_run; TRAIN_ITERS: trainer.max_steps; XLA_USE_BF16: precision.type; "
        "NEURON_CC_FLAGS: parallel_engine.compiler_flags"
    ]


def test_a_run_without_them_has_no_such_note():
    assert NxDTraining().environment_note({"MASTER_PORT": "41000", "COMPILE": ""}) is None


@pytest.mark.parametrize(("name", "effect"), VARIABLES.items())
def test_each_variable_is_in_the_docs_with_keys_that_exist(name, effect):
    (cell,) = re.findall(rf"^\| `{name}` \| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert cell.replace("`", "") == effect
    for key in re.findall(r"`([a-z_.]+)`", cell):
        assert key in core_keys() or key in OF_ENGINE.values()
