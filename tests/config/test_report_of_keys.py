"""Every row that the report gives for one wrong key: place, key, what was found, what is allowed, what was meant."""

from __future__ import annotations

import pytest

from nxdt_core import config
from nxdt_core.config import section
from nxdt_core.errors.configuration import ConfigError

KEYS = {
    "unknown key beside its neighbour": (
        "trainer.max_step=5",
        "trainer.max_step: unknown key. Did you mean 'trainer.max_steps'? [NXDT-C010]",
    ),
    "key of another section": (
        "context_parallel_size=2",
        "context_parallel_size: unknown key. Did you mean 'distributed_strategy.context_parallel_size'? [NXDT-C010]",
    ),
    "name of a key in other programs": (
        "model.learning_rate=1e-3",
        "model.learning_rate: unknown key. Did you mean 'model.optim.lr'? [NXDT-C010]",
    ),
    "name in other programs, in its section": (
        "model.optim.learning_rate=1e-3",
        "model.optim.learning_rate: unknown key. Did you mean 'model.optim.lr'? [NXDT-C010]",
    ),
    "key of two other sections": (
        "model.max_steps=5",
        "model.max_steps: unknown key. Did you mean 'trainer.max_steps' or 'model.optim.sched.max_steps'? [NXDT-C010]",
    ),
    "key like no other": (
        "checkpoint.storage.zzz=5",
        "checkpoint.storage.zzz: unknown key. Known here: 'name', 'fsync'. [NXDT-C010]",
    ),
    "key of a component's nested section": (
        "model.rope_scaling={factr: 2.0}",
        "model.rope_scaling.factr: unknown key. Did you mean 'model.rope_scaling.factor'? [NXDT-C010]",
    ),
    "number in quotes": (
        "trainer.max_steps='40'",
        "trainer.max_steps: found '40' (text); allowed: an integer of at least 1. Write it without quotes. [NXDT-C012]",
    ),
    "boolean for an integer": (
        "trainer.max_steps=true",
        "trainer.max_steps: found true (a boolean); allowed: an integer of at least 1. [NXDT-C012]",
    ),
    "float for an integer": (
        "trainer.max_steps=1e4",
        "trainer.max_steps: found 10000.0 (a number); allowed: an integer of at least 1. Write 10000. [NXDT-C012]",
    ),
    "integer for a boolean": (
        "data.shuffle=1",
        "data.shuffle: found 1 (an integer); allowed: true or false. [NXDT-C012]",
    ),
    "number for text": (
        "name=3",
        "name: found 3 (an integer); allowed: text. Write it in quotes: name=\"'3'\". [NXDT-C012]",
    ),
    **{
        f"{text} for text": (
            f"name={text}",
            f"name: found {value} ({kind}); allowed: text. Write it in quotes: name=\"'{text}'\". [NXDT-C012]",
        )
        for text, value, kind in (
            ("2026_11_28", 20261128, "an integer"),
            ("007", 7, "an integer"),
            ("0x10", 16, "an integer"),
            ("1e5", 100000.0, "a number"),
            ("3.10", 3.1, "a number"),
        )
    },
    "out of bounds": (
        "trainer.max_steps=0",
        "trainer.max_steps: found 0 (an integer); allowed: an integer of at least 1. [NXDT-C012]",
    ),
    "out of a component's bounds": (
        "model.dropout=1.5",
        "model.dropout: found 1.5 (a number); allowed: a number from 0 to 1. [NXDT-C012]",
    ),
    "not a number": (
        "model.optim.lr=.nan",
        "model.optim.lr: found nan (a number); allowed: a number of at least 0. It must be finite. [NXDT-C012]",
    ),
    "not finite": (
        "model.optim.lr=.inf",
        "model.optim.lr: found inf (a number); allowed: a number of at least 0. It must be finite. [NXDT-C012]",
    ),
    "not among the choices": (
        "model.optim.sched={name: WSD, decay_shape: sqr}",
        "model.optim.sched.decay_shape: found 'sqr' (text); allowed: 'linear', 'cosine' or 'sqrt'."
        " Did you mean 'sqrt'? [NXDT-C012]",
    ),
    "not among the choices or null": (
        "distributed_strategy.zero_stage=5",
        "distributed_strategy.zero_stage: found 5 (an integer); allowed: 1, 2, 3 or null. [NXDT-C012]",
    ),
    "scalar for a list": (
        "trainer.callbacks=beep",
        "trainer.callbacks: found 'beep' (text); allowed: a list, each item text or a mapping."
        " Write a list: [beep]. [NXDT-C012]",
    ),
    "list too short": (
        "model.betas=[0.9]",
        "model.betas: found a list of 1; allowed: a list of 2: a number, a number. [NXDT-C012]",
    ),
    "wrong item": (
        "model.betas=[0.9, x]",
        "model.betas: found 'x' (text) as item 2 of the list; allowed: a list of 2: a number, a number. [NXDT-C012]",
    ),
    "list for a section": (
        "trainer=[1]",
        "trainer: found [1] (a list); allowed: a mapping. [NXDT-C012]",
    ),
    "number for a section that selects a component": (
        "model=4",
        "model: found 4 (an integer); allowed: a mapping. [NXDT-C012]",
    ),
    "null for a required key": (
        "data.global_batch_size=null",
        "data.global_batch_size: found null; allowed: an integer of at least 1. [NXDT-C012]",
    ),
    "mandatory mark of OmegaConf": (
        "data.global_batch_size='???'",
        "data.global_batch_size: required key is missing. Give it an integer of at least 1. [NXDT-C011]",
    ),
    "package of a path is not installed": (
        "data.files=['package://no_such_package/x.txt']",
        "data.files: found 'package://no_such_package/x.txt', but no package 'no_such_package' is installed;"
        " allowed: a list, each item a path. [NXDT-C012]",
    ),
    "number beyond float32": (
        "model.optim.weight_decay=1e39",
        "model.optim.weight_decay: found a number beyond ±1e30; allowed: a number of at least 0. [NXDT-C012]",
    ),
    "path that leaves its package": (
        "data.files=['package://nxdt_core/../x.txt']",
        "data.files: found 'package://nxdt_core/../x.txt', but the path leaves the package 'nxdt_core';"
        " allowed: a list, each item a path. [NXDT-C012]",
    ),
    "no equals sign": (
        "trainer.max_steps",
        "'trainer.max_steps' sets no key: it has no '='. Write key.path=value, such as trainer.max_steps=100."
        " [NXDT-C006]",
    ),
    "pattern without quotes": (
        "data.train_files=[*.jsonl]",
        "'data.train_files=…' sets no key: the value is not valid YAML: '*' begins the name of an anchor there; quote a"
        " text that begins with it: '*.jsonl'. Write key.path=value, such as trainer.max_steps=100. [NXDT-C006]",
    ),
    "plugin list as text": (
        "plugins.block=llama",
        "plugins.block: found 'llama' (text); allowed: a list, each item text. Write a list: [llama]. [NXDT-C012]",
    ),
    "what a component finds": (
        "model.num_attention_heads=5",
        "model.num_attention_heads: 32 does not divide by 5. [NXDT-C019]",
    ),
    "what a plugin finds": (
        "trainer.max_steps=13",
        "trainer.max_steps: 13 is unlucky (plugin 'parts'). Write 14. [NXDT-C019]",
    ),
    "what a component's constructor finds": (
        "model.optim={name: fussy, mode: post_init}",
        "model.optim: mode post_init is never right. [NXDT-C019]",
    ),
    "a component's check that crashes": (
        "model.optim={name: fussy, mode: crash}",
        "model.optim: the configuration class of parts:fussy is faulty: its check raised ZeroDivisionError: boom."
        " Report this to the author of local. [NXDT-C018]",
    ),
    "a component's class with a type that YAML lacks": (
        "model.optim={name: broken}",
        "model.optim.name: the configuration class of parts:broken is faulty: a key of BrokenConfig has a type that no"
        " YAML value can be read into: Handle. Report this to the author of local. [NXDT-C018]",
    ),
}


@pytest.mark.parametrize(("override", "row"), KEYS.values(), ids=KEYS)
def test_one_row_says_everything(report, good, override, row):
    # What is missing, and what a section as a whole gets wrong, is told at the section.
    place = "run.yaml:4" if "is missing" in row else "run.yaml:11" if "model.optim: " in row else "command line"
    assert report(good, override) == [f"{place}: {row}"]


def test_a_default_does_not_do_where_a_value_must_be_given(report, good):
    asked = good.replace("max_steps: 100", "max_steps: 100\n  devices: ???")
    missing = "run.yaml:4: trainer.devices: required key is missing. Give it a value in place of ???. [NXDT-C011]"
    assert report(asked) == [missing]
    assert report(asked, "trainer.devices=2") == []


def test_rows_name_the_line_of_the_file(report, good):
    text = good.replace("max_steps: 100", "max_steps: 100\n  devces: 1").replace("name: lines", "name: line")
    rows = report(text)
    assert rows[0] == "run.yaml:4: trainer.devces: unknown key. Did you mean 'trainer.devices'? [NXDT-C010]"
    assert rows[1].startswith("run.yaml:6: data.name: No dataset is called 'line'")
    assert "Did you mean 'lines'?" in rows[1]
    assert rows[1].endswith("[NXDT-K002]")


def test_all_problems_are_told_at_once_in_the_order_of_the_file(report):
    rows = report(
        """\
        name: 7
        trainer: {max_steps: many, max_step: 4}
        data:
          name: lines
          global_batch_size: 8
          text_kye: x
        model:
          name: tiny
          hidden_size: -1
        """,
        "seed=none",
        "nothing",
    )
    places = [row.split(": ")[:2] for row in rows]
    assert places == [
        ["run.yaml:1", "name"],
        ["run.yaml:2", "trainer.max_steps"],
        ["run.yaml:2", "trainer.max_step"],
        ["run.yaml:3", "data.seq_length"],
        ["run.yaml:6", "data.text_kye"],
        ["run.yaml:9", "model.hidden_size"],
        ["command line", "'nothing' sets no key"],
        ["command line", "seed"],
    ]


def test_a_missing_section_is_told_by_its_required_keys(report):
    rows = report("name: run\n")
    assert (
        "run.yaml:1: trainer.max_steps: required key is missing. Give it an integer of at least 1. [NXDT-C011]" in rows
    )
    assert "run.yaml:1: data.seq_length: required key is missing. Give it an integer of at least 1. [NXDT-C011]" in rows


def test_the_error_prints_all_rows(load, good):

    with pytest.raises(ConfigError) as caught:
        load(good, "trainer.max_steps=0", "seed=0")
    assert str(caught.value) == (
        "[NXDT-C001] run.yaml: 2 problems.\n"
        "  command line: seed: found 0 (an integer); allowed: an integer of at least 1. [NXDT-C012]\n"
        "  command line: trainer.max_steps: found 0 (an integer); allowed: an integer of at least 1. [NXDT-C012]"
    )


def test_check_gives_the_problems_without_raising(kernel, good, tmp_path):
    from nxdt_core import config

    path = tmp_path / "run.yaml"
    path.write_text(good)
    assert config.check(path, kernel=kernel) == ()
    assert [problem.key for problem in config.check(path, ["seed=0"], kernel=kernel)] == ["seed"]


@pytest.mark.parametrize("value", ["nan", "inf", "'-inf'", ".nan"])
def test_a_number_that_is_not_finite_is_not_told_to_lose_its_quotes(report, good, value):
    (row,) = report(good, f"model.optim.lr={value}")
    assert "It must be finite." in row
    assert "quotes" not in row


def test_a_section_with_a_value_that_cannot_be_read_is_not_judged_by_its_default():
    """``factor`` has a default that ``check()`` of its section would refuse."""
    problems = config.check("recipe:llama3.1-8b", ["model.rope_scaling.factor=${nope}"])
    assert [problem.code for problem in problems] == ["NXDT-C013"]


def test_names_of_other_programs_stand_for_keys_that_exist():
    known = {path.rpartition(".")[2] for path, _ in config.load("recipe:llama-tiny").values()}
    assert set(section._NAMES_ELSEWHERE.values()) <= known


@pytest.mark.parametrize("value", ["[1]", "[[x]]", "[]", "true", "3"])
@pytest.mark.parametrize("section", ["model", "data", "model.optim", "checkpoint", "trainer", "data.tokenizer"])
@pytest.mark.parametrize("published", [False, True])
def test_a_section_that_is_no_mapping_is_a_problem(report, good, tmp_path, section, value, published):
    (tmp_path / "config.json").write_text('{"model_type": "tiny", "architectures": ["TinyForCausalLM"]}')
    rows = report(good, *([f"checkpoint.resume_from={tmp_path}"] if published else []), f"{section}={value}")
    assert any(f" {section}: found " in row and "allowed: a mapping" in row for row in rows)
