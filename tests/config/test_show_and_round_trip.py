"""What is shown loads again, and what is saved loads equal."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxdt_core import config
from nxdt_core.config.show import _scalar


def test_show_prints_each_value_with_its_origin(load, good):
    text = config.render_show(load(good, "trainer.max_steps=5", "compiler_cache_url=x"))
    lines = text.splitlines()
    assert lines[0] == "# run.yaml, resolved"
    assert lines[1].startswith("# note: compiler_cache_url: no effect")
    assert "  max_steps: 5                                    # command line" in lines
    assert "name: run                                         # run.yaml:1" in lines
    assert "  seq_length: 64                                  # run.yaml:7" in lines


def test_show_of_what_is_set_leaves_defaults_out(load, good):
    text = config.render_show(load(good), only_set=True)
    assert yaml.safe_load(text) == {
        "name": "run",
        "trainer": {"max_steps": 100},
        "data": {"name": "lines", "global_batch_size": 8, "seq_length": 64},
        "model": {"name": "tiny", "hidden_size": 32, "optim": {"lr": 1e-3}},
    }


CASES = [
    [],
    ["data.tokenizer=byte", "model.rope_scaling={factor: 8.0, kind: llama3}", "model.optim=fussy"],
    ["exp_manager.loggers=[{name: csv, flush_every: 2}]", "trainer.callbacks=[beep]", "checkpoint.uri=memory://x"],
    ["checkpoint.resume_if_exists=true", "name=${model.name}"],
    ["data.files=[a.txt]", "plugins.prefer=[parts]"],
]


@pytest.mark.parametrize("overrides", CASES, ids=range(len(CASES)))
def test_the_plain_tree_and_the_shown_text_load_equal(kernel, load, good, overrides):
    resolved = load(good, *overrides)
    plain = json.loads(json.dumps(resolved.to_dict()))
    assert config.load(plain, kernel=kernel) == resolved
    assert config.load(plain, kernel=kernel).to_dict() == plain
    assert config.load(yaml.safe_load(config.render_show(resolved)), kernel=kernel) == resolved


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
PLAIN = TEXT.filter(lambda text: "${" not in text and text != "???")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=PLAIN,
    steps=st.integers(1, 10**9),
    lr=st.floats(0, 10, allow_nan=False),
    clip=st.none() | st.floats(0, 1e6),
    limit=st.none() | st.integers(0, 99) | st.floats(0, 1),
    version=st.none() | PLAIN | st.integers(-(2**63), 2**63 - 1),
    texts=st.lists(PLAIN.filter(lambda text: not text.startswith(("~", "package://"))), max_size=3),
    kind=st.sampled_from(["linear", "llama3"]),
)
def test_any_values_survive_saving(kernel, name, steps, lr, clip, limit, version, texts, kind):
    tree = {
        "name": name,
        "trainer": {"max_steps": steps, "gradient_clip_val": clip, "limit_val_batches": limit},
        "exp_manager": {"version": version},
        "data": {"name": "lines", "global_batch_size": 2, "seq_length": 8, "files": texts},
        "model": {"name": "tiny", "hidden_size": 8, "rope_scaling": {"kind": kind}, "optim": {"lr": lr}},
    }
    if steps == 13:
        return
    resolved = config.load(tree, kernel=kernel)
    run = resolved.run
    assert (run.name, run.trainer.max_steps, run.model.optim.lr, run.exp_manager.version) == (name, steps, lr, version)
    assert config.load(yaml.safe_load(config.render_show(resolved)), kernel=kernel) == resolved


WORDS = ("yes", "No", "ON", "null", "y", "1e5", "0x1", "e5", "~", "<<", "---")
PATHS = ("a.b", "a--", "/a/b-c.d", "/", "a b", "a: b", "")


@pytest.mark.parametrize("text", [*WORDS, *PATHS])
def test_a_text_is_shown_as_what_yaml_reads_as_the_same_text(text):
    assert yaml.safe_load(f"{{{_scalar(text)}: [{_scalar(text)}, {_scalar([])}]}}") == {text: [text, []]}
