"""Where a value comes from when several places could give it."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import pytest
from pydantic import field_validator, model_validator

from nxdt_core.config.read import read_part
from nxdt_core.config.section import Section


def test_the_smallest_configuration_gets_all_defaults(load, good):
    config = load(good)
    run = config.run
    assert (run.trainer.max_steps, run.seed, run.precision.type, run.parallel_engine.name) == (
        100,
        1234,
        "fp32",
        "torch",
    )
    assert run.model.optim.sched.max_steps == 100, "the curve ends with the run"
    assert run.exp_manager.name == "run"
    assert config.run_dir == Path("nxdt_experiments/run")
    assert config.checkpoint_uri == "nxdt_experiments/run/checkpoints"
    assert [logger.component.record.name for logger in config.loggers] == ["tensorboard"]
    assert config.components["tokenizer"] is None
    assert config.components["adapter"] is None
    assert config.notes == ()


def test_origins_say_who_gave_each_value(load, good):
    config = load(good, "seed=7", "checkpoint.resume_if_exists=true")
    shown = {path: str(origin) for path, origin in config.origins.items()}
    assert shown["trainer.max_steps"] == "run.yaml:3"
    assert shown["model.optim.lr"] == "run.yaml:12"
    assert shown["seed"] == "command line"
    assert shown["exp_manager.name"] == "default name"
    assert shown["model.vocab_size"] == "default TinyConfig"
    assert shown["checkpoint.save_top_k"] == "default"
    assert shown["model.optim.sched.max_steps"] == "default trainer.max_steps"
    assert set(shown) == {path for path, _ in config.values()}


def test_a_component_default_goes_before_the_core_default(load, good):
    config = load(good)
    assert config.run.data.shuffle is False, "LinesConfig says so, the core would say true"
    assert config.selected("dataset").config.shuffle is False
    assert load(good, "data.shuffle=true").selected("dataset").config.shuffle is True


def test_a_key_of_core_and_component_reaches_both(load, good):
    config = load(good, "model.optim.weight_decay=0.3")
    assert config.run.model.optim.lr == config.selected("optimizer").config.lr == 1e-3
    assert config.run.model.optim.weight_decay == config.selected("optimizer").config.weight_decay == 0.3


def test_later_overrides_win_and_override_the_file(load, good):
    assert load(good, "trainer.max_steps=5", "trainer.max_steps=6").run.trainer.max_steps == 6


def test_an_override_of_a_section_keeps_what_it_does_not_name(load, good):
    config = load(good, "model={vocab_size: 99}")
    assert (config.selected("model").config.vocab_size, config.selected("model").config.hidden_size) == (99, 32)


def test_null_means_not_set_where_null_is_no_value(load, good):
    run = load(
        good, "exp_manager.exp_dir=null", "exp_manager.name=null", "seed=null", "trainer.gradient_clip_val=null"
    ).run
    assert (run.exp_manager.exp_dir, run.exp_manager.name, run.seed) == ("./nxdt_experiments", "run", 1234)
    assert run.trainer.gradient_clip_val is None, "there null is a value"


@pytest.mark.parametrize(
    ("overrides", "directory"),
    [
        (["exp_manager.exp_dir=runs"], "runs/run"),
        (["exp_manager.exp_dir=runs", "exp_manager.name=other"], "runs/other"),
        (["exp_manager.version=2"], "nxdt_experiments/run/2"),
        (["exp_manager.explicit_log_dir=/logs/x", "exp_manager.version=2"], "/logs/x"),
    ],
)
def test_the_run_directory_follows_exp_manager(load, good, overrides, directory):
    config = load(good, *overrides)
    assert config.run_dir == Path(directory)
    assert config.checkpoint_uri == f"{directory}/checkpoints"


INTERPOLATIONS = [
    ("trainer.max_steps=${multiply:2,${data.global_batch_size}}", "trainer.max_steps", 16),
    ("model.vocab_size=${.hidden_size}", "model.vocab_size", 32),
    ("name=${model.name}-${data.seq_length}", "name", "tiny-64"),
    ("model.vocab_size=${seed}", "model.vocab_size", 1234),
    ("trainer.val_check_interval=${trainer.max_steps}", "trainer.val_check_interval", 100),
    ("exp_manager.exp_dir=${oc.env:NXDT_TEST_DIR}", "exp_manager.exp_dir", "from-environment"),
    ("model.optim.sched=${model.optim.nothing}", None, "there is no key 'model.optim.nothing'"),
    ("trainer.max_steps=${trainer.max_stps}", None, "Did you mean ${trainer.max_steps}?"),
    ("trainer.max_steps=${trainer.max_steps}", None, "it refers to itself"),
    ("trainer.max_steps=${multiply:a,2}", None, "multiply needs two numbers, not 'a' and 2"),
    ("trainer.max_steps=${", None, "it is malformed"),
    ("name=${oc.env:NXDT_TEST_UNSET}", None, "Set the variable, or give a default: ${oc.env:NAME,default}."),
]


@pytest.mark.parametrize(("override", "key", "value"), INTERPOLATIONS)
def test_interpolations(load, report, good, monkeypatch, override, key, value):
    monkeypatch.setenv("NXDT_TEST_DIR", "from-environment")
    if key is None:
        (row,) = report(good, override)
        assert value in row
        assert row.endswith("[NXDT-C013]")
    else:
        assert dict(load(good, override).values())[key] == value


def test_an_interpolated_section_is_taken_whole(load, good):
    text = (
        good.replace("  name: lines\n", "  name: lines\n  text_key: ${name}\n")
        + "checkpoint: ${exp_manager.wandb_logger_kwargs}\n"
    )
    config = load(text.replace("trainer:", "exp_manager: {wandb_logger_kwargs: {resume_if_exists: true}}\ntrainer:"))
    assert config.run.checkpoint.resume_if_exists is True
    assert config.selected("dataset").config.text_key == "run"


def test_loading_leaves_no_resolver_behind_at_import():
    import subprocess
    import sys

    probe = "import nxdt_core.config, sys; print('omegaconf' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"


def test_a_section_that_is_another_one_by_reference_has_its_keys_checked(report, good):
    rows = report(good, "model.rope_scaling=${data}")
    assert any(row.startswith("command line: model.rope_scaling.seq_length: unknown key.") for row in rows)
    assert not any("required" in row for row in rows), "keys of that section have defaults"


def test_an_unknown_key_is_reported_also_where_its_reference_leads_nowhere(report, good):
    rows = report(good, "model.hidden_sizes=${nope}")
    assert [row.rpartition(" ")[2] for row in rows] == ["[NXDT-C013]", "[NXDT-C010]"]


class Pairs(Section):
    count: int

    @field_validator("count")
    @classmethod
    def even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("an odd one leaves a record without its pair")
        return value


def test_what_a_validator_of_a_key_says_is_in_the_problem():
    _, (problem,) = read_part(Pairs, {"count": 3}, "data")
    assert problem.key == "data.count"
    assert problem.do() == "An odd one leaves a record without its pair."


class Ordered(Section):
    low: int = 0
    high: int = 1

    @model_validator(mode="after")
    def in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


@pytest.mark.parametrize("path", ["", "data"])
def test_what_a_validator_of_a_section_says_is_a_problem_of_the_section(path):
    instance, (problem,) = read_part(Ordered, {"low": 2}, path)
    assert (instance, problem.key, problem.what()) == (None, path, "low is above high.")
