"""Sources that cannot be read, and YAML that is none."""

from __future__ import annotations

import pytest

from nxdt_core import config
from nxdt_core.errors.configuration import ConfigError

SYNTAX = {
    "unclosed list": (
        "a: [1,\nb: 2\n",
        "run.yaml:3: not valid YAML: while parsing a flow sequence, did not find expected ',' or ']'."
        " Correct that line or the one above it. [NXDT-C004]",
    ),
    "colon in a value": (
        "a: 1\nb: c: d\n",
        "run.yaml:2: not valid YAML: mapping values are not allowed in this context."
        " Correct that line or the one above it. [NXDT-C004]",
    ),
    "tabs": (
        "a:\n\tb: 1\n",
        "run.yaml:2: not valid YAML: a tab indents the line, and YAML takes spaces alone."
        " Correct that line or the one above it. [NXDT-C004]",
    ),
    "two documents": (
        "a: 1\n---\nb: 2\n",
        "run.yaml:2: not valid YAML: expected a single document in the stream, but found another document."
        " Correct that line or the one above it. [NXDT-C004]",
    ),
    "a list": (
        "- a\n- b\n",
        "run.yaml:1: found no mapping at the top; allowed: a mapping of keys and values. [NXDT-C012]",
    ),
    "text": (
        "hello\n",
        "run.yaml:1: found no mapping at the top; allowed: a mapping of keys and values. [NXDT-C012]",
    ),
}


@pytest.mark.parametrize(("text", "row"), SYNTAX.values(), ids=SYNTAX)
def test_broken_yaml_is_one_row_with_its_line(report, text, row):
    assert report(text) == [row]


def test_a_key_that_stands_twice_is_told_with_both_lines(report, good):
    assert report(good + "name: again\n") == [
        "run.yaml:13: name: the key occurs twice; first at run.yaml:1. Remove one of them. [NXDT-C005]"
    ]


def test_an_empty_file_lacks_its_required_keys(report):
    missing = "run.yaml:1: trainer.max_steps: required key is missing. Give it an integer of at least 1. [NXDT-C011]"
    assert missing in report("")


def test_a_missing_file_names_those_beside_it(kernel, tmp_path):
    (tmp_path / "llama.yaml").touch()
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path / "lama.yaml", kernel=kernel)
    (problem,) = caught.value.problems
    assert problem.code == "NXDT-C002"
    assert problem.what() == f"no file '{tmp_path / 'lama.yaml'}'."
    assert problem.do() == f"Did you mean '{tmp_path / 'llama.yaml'}'?"


def test_a_directory_and_bytes_are_told_apart(kernel, tmp_path):
    binary = tmp_path / "run.yaml"
    binary.write_bytes(b"name: \xff\n")
    for path, reason in ((tmp_path, "is a directory"), (binary, "byte 6 is no UTF-8")):
        (problem,) = config.check(path, kernel=kernel)
        assert (problem.code, problem.what()) == ("NXDT-C003", f"cannot read '{path}': {reason}.")


def test_a_byte_order_mark_is_skipped(load, good):
    assert load("\ufeff" + good).run.name == "run"


def test_a_mapping_loads_like_a_file(kernel):
    tree = {
        "name": "run",
        "trainer": {"max_steps": 3},
        "data": {"name": "lines", "global_batch_size": 2, "seq_length": 8},
        "model": {"name": "tiny", "hidden_size": 4, "optim": {"lr": 0.1}},
    }
    assert config.load(tree, kernel=kernel).run.trainer.max_steps == 3
    tree["seed"] = "x"
    assert [problem.row() for problem in config.check(tree, kernel=kernel)] == [
        "mapping: seed: found 'x' (text); allowed: an integer of at least 1. [NXDT-C012]"
    ]


def test_an_object_in_a_mapping_is_a_wrong_value_and_no_crash(kernel):
    problems = config.check({"name": "run", "seed": object(), "model": {"name": "${name}"}}, kernel=kernel)
    assert "seed" in [problem.key for problem in problems]
