"""Keys of other frameworks, read directly: each message names the key to write here, or says why none is needed."""

from __future__ import annotations

import pytest
from nxdt_plugin_migrate.config.renamed_keys import (
    GONE,
    LLAMA_NAMES,
    LOSES_NOTHING,
    LOST,
    MOVED,
    NEUTRAL,
    NNM_MOVED,
    OF_ENGINE,
    RENAMED,
    current_name,
)

from nxdt_core import config
from nxdt_core.errors.configuration import UnknownKey
from nxdt_core.kernel import Kernel

SECTIONS = {"model.tokenizer", "model.data"}
TARGETS = {**RENAMED, **MOVED, **NNM_MOVED, **LLAMA_NAMES}
MODELS = {
    "model.moe": "mixtral-tiny",
    "model.rope_theta": "llama-tiny",
    "model.head_dim": "llama-tiny",
    "model.sliding": "mistral-tiny",
}
"""Key, or section, that gpt-tiny does not read → a recipe that does."""


@pytest.fixture(scope="module")
def kernel():
    return Kernel.start()


def problems(key, kernel, recipe="gpt-tiny"):
    value = "{x: 1}" if key in SECTIONS else "2"
    return [each for each in config.check(f"recipe:{recipe}", [f"{key}={value}"], kernel=kernel) if each.key == key]


@pytest.mark.parametrize("key", [key for key in TARGETS if "callback_params" not in key])
def test_a_key_that_has_another_name_here_is_reported_with_it(kernel, key):
    target = TARGETS[key]
    recipe = next((name for place, name in MODELS.items() if target.startswith(place)), "gpt-tiny")
    (problem,) = problems(key, kernel, recipe)
    assert isinstance(problem, UnknownKey)
    followed = current_name(target, {*NEUTRAL, *GONE, *OF_ENGINE, *RENAMED.values(), target})
    if followed in OF_ENGINE or followed in GONE or (followed in NEUTRAL and not problem.candidates):
        assert "It is a key of N" in problem.row()
    else:
        assert problem.candidates[0] in (target, LLAMA_NAMES.get(target), RENAMED.get(target))


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("model.rotary_base", "model.rope_theta"),
        ("model.num_query_groups", "model.num_kv_heads"),
    ],
)
def test_the_name_is_the_one_that_the_model_reads(kernel, key, wanted):
    (problem,) = problems(key, kernel, "llama-tiny")
    assert f"It is a key of NeMo. Here it is {wanted!r}." in problem.row()


@pytest.mark.parametrize("key", [*LOSES_NOTHING, *LOST])
def test_a_key_without_a_counterpart_is_reported_with_the_reason(kernel, key):
    for problem in problems(key, kernel):
        if isinstance(problem, UnknownKey):
            reason = LOSES_NOTHING.get(key) or LOST[key][0]
            assert f"It is a key of NeMo: {reason}. Leave it out." in problem.row()


def test_a_key_that_nobody_renamed_has_no_current_name():
    assert current_name("trainer.max_step", {"trainer.max_steps"}) is None
