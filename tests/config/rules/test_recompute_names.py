"""Names of modules to recompute: a wrong one is reported before anything is built, and records list the right ones."""

from __future__ import annotations

import pytest

from nxdt_core import config
from nxdt_core.api import ModelComponent
from nxdt_core.kernel import Kernel
from nxdt_core.train import build

SELECTIVE = "model.activations_checkpoint_granularity=selective"
NAMES = "model.activations_checkpoint_recompute"
MODELS = ("gpt", "llama", "mistral", "mixtral")


@pytest.fixture(scope="module")
def kernel():
    return Kernel.start()


@pytest.mark.parametrize("model", MODELS)
def test_a_name_that_the_model_lacks_is_reported_with_its_own(kernel, model):
    (problem,) = config.check(
        f"recipe:{model}-tiny", [SELECTIVE, f"{NAMES}=[CoreAttention, CoreAtention]"], kernel=kernel
    )
    assert problem.key == NAMES
    row = problem.row()
    assert f"found 'CoreAtention', which model {model!r} does not have; allowed: CoreAttention, " in row
    assert row.endswith("Did you mean 'CoreAttention'? [NXDT-C012]")


def test_names_that_are_not_read_are_not_judged(kernel):
    words = ["model.activations_checkpoint_granularity=null", f"{NAMES}=[NoSuch]"]
    assert config.check("recipe:llama-tiny", words, kernel=kernel) == ()


@pytest.mark.parametrize("model", MODELS)
def test_the_record_lists_the_names_of_the_plan(kernel, model):
    loaded = config.load(f"recipe:{model}-tiny", kernel=kernel)
    record = loaded.selected("model").component.record
    assert isinstance(record, ModelComponent)
    assert set(record.recompute_names) == set(build.model_builder(loaded).plan().recompute)
