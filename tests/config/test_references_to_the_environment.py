"""What comes from the environment is used as its value, and written as its reference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from nxdt_core import config
from nxdt_core.config import Origin
from nxdt_core.config.read import interpolate
from nxdt_core.config.tree import MASK, Tree

CANARY = "canary-4711-value"
"""Never to be found in anything that is written."""

KEPT = [
    ("exp_manager.exp_dir=${oc.env:NXDT_CANARY}", "exp_manager.exp_dir", "${oc.env:NXDT_CANARY}"),
    ("checkpoint.uri=memory://b/${oc.env:NXDT_CANARY}", "checkpoint.uri", "memory://b/${oc.env:NXDT_CANARY}"),
    ("name=${oc.env:NXDT_UNSET,fallback}", "name", "${oc.env:NXDT_UNSET,fallback}"),
    ("trainer.max_steps=${oc.decode:${oc.env:NXDT_STEPS}}", "trainer.max_steps", "${oc.decode:${oc.env:NXDT_STEPS}}"),
    ("data.files=[a.txt,'/d/${oc.env:NXDT_CANARY}']", "data.files", ["/cwd/a.txt", "/d/${oc.env:NXDT_CANARY}"]),
    ("data.files=['x/${oc.env:NXDT_CANARY}']", "data.files", ["/cwd/x/${oc.env:NXDT_CANARY}"]),
    ("data.files=['~/${oc.env:NXDT_CANARY}']", "data.files", ["~/${oc.env:NXDT_CANARY}"]),
    ("exp_manager.loggers=[{name: board, prefix: '${oc.env:NXDT_CANARY}'}]", "exp_manager.loggers", None),
    ("model.betas=${oc.decode:${oc.env:NXDT_BETAS}}", "model.betas", "${oc.decode:${oc.env:NXDT_BETAS}}"),
]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("NXDT_CANARY", CANARY)
    monkeypatch.setenv("NXDT_STEPS", "17")
    monkeypatch.setenv("NXDT_BETAS", "[0.5, 0.75]")
    monkeypatch.delenv("NXDT_UNSET", raising=False)


@pytest.mark.parametrize(("override", "key", "shown"), KEPT)
def test_the_reference_is_written_and_loads_to_the_same_value(kernel, load, good, override, key, shown):
    resolved = load(good, override)
    written = config.render_show(resolved)
    assert CANARY not in written
    tree = resolved.to_dict()
    for part in key.split("."):
        tree = tree[part]
    if shown is not None:
        expected = yaml.safe_load(yaml.safe_dump(shown).replace("/cwd", str(Path.cwd())))
        assert tree == expected
    assert config.load(yaml.safe_load(written), kernel=kernel) == resolved
    assert config.load(resolved.to_dict(), kernel=kernel) == resolved


def test_the_value_itself_is_used(load, good):
    resolved = load(
        good, "checkpoint.uri=memory://b/${oc.env:NXDT_CANARY}", "model.betas=${oc.decode:${oc.env:NXDT_BETAS}}"
    )
    assert resolved.checkpoint_uri == f"memory://b/{CANARY}"
    assert resolved.selected("model").config.betas == (0.5, 0.75)
    assert resolved.to_values()["checkpoint"]["uri"] == f"memory://b/{CANARY}"


def test_who_refers_to_a_reference_is_one_too(load, good):
    resolved = load(good, "exp_manager.exp_dir=${oc.env:NXDT_CANARY}", "checkpoint.uri=memory://${exp_manager.exp_dir}")
    assert resolved.checkpoint_uri == f"memory://{CANARY}"
    assert resolved.to_dict()["checkpoint"]["uri"] == "memory://${exp_manager.exp_dir}"


def test_an_alias_refers_to_what_was_written(load, good):
    resolved = load(good, "name=${oc.env:NXDT_CANARY}")
    assert resolved.to_dict()["exp_manager"]["name"] == "${name}"
    assert CANARY not in config.render_show(resolved)


def test_of_a_whole_section_from_the_environment_each_value_is_masked(load, good, monkeypatch):
    monkeypatch.setenv("NXDT_SECTION", f"{{uri: 'memory://{CANARY}'}}")
    resolved = load(good, "checkpoint=${oc.decode:${oc.env:NXDT_SECTION}}")
    assert resolved.checkpoint_uri == f"memory://{CANARY}"
    assert resolved.to_dict()["checkpoint"]["uri"] == MASK
    assert CANARY not in config.render_show(resolved)


def test_of_a_copied_section_each_value_refers_to_the_same_place():
    tree = Tree.of({"a": "${b}", "b": {"x": "${oc.env:NXDT_CANARY}", "l": [1]}}, Origin(kind="file", where=""))
    assert not interpolate(tree)
    assert {key: tree.as_displayed(("a", key)) for key in tree.get("a")} == {"x": "${b.x}", "l": "${b.l}"}
    assert tree.get("a") == {"x": CANARY, "l": [1]}


def test_a_variable_that_is_missing_is_named_with_its_key(report, good):
    (row,) = report(good, "checkpoint.uri=memory://${oc.env:NXDT_UNSET}")
    assert "checkpoint.uri: cannot resolve 'memory://${oc.env:NXDT_UNSET}'" in row
    assert "'NXDT_UNSET' not found" in row
    assert "Set the variable" in row


@pytest.mark.parametrize(
    ("value", "advised"), [("${oc.env:NXDT_TEXT}", True), ("${oc.decode:${oc.env:NXDT_TEXT}}", False)]
)
def test_text_is_advised_to_be_decoded_once(report, good, monkeypatch, value, advised):
    monkeypatch.setenv("NXDT_TEXT", "some text")
    (row,) = report(good, f"model.hidden_size={value}")
    assert ("The value of a variable is text: write ${oc.decode:${oc.env:NXDT_TEXT}}" in row) is advised


@pytest.mark.parametrize(
    "text",
    ["${oc.decode:" * 500 + "x" + "}" * 500, "${oc.create:" + "[" * 500 + "]" * 500 + "}"],
    ids=["interpolations", "lists"],
)
def test_an_interpolation_that_is_nested_too_deep_is_a_problem(report, good, text):
    rows = report(good.replace("name: run", f"name: '{text}'"))
    assert "it is nested too deep (at most 50 levels)" in rows[0]


def test_text_from_the_environment_that_is_nested_too_deep_is_a_problem(report, good, monkeypatch):
    monkeypatch.setenv("NXDT_TEXT", "[" * 2000 + "]" * 2000)
    rows = report(good.replace("name: run", "name: ${oc.decode:${oc.env:NXDT_TEXT}}"))
    assert "nested too deep" in rows[0]


def test_an_integer_from_the_environment_has_64_bits(report, good, monkeypatch):
    monkeypatch.setenv("NXDT_STEPS", str(2**63))
    (row,) = report(good, "trainer.max_steps=${oc.decode:${oc.env:NXDT_STEPS}}")
    assert "[NXDT-C012]" in row


def test_a_variable_that_is_not_utf_8_is_a_problem_of_its_key(report, good, monkeypatch):
    monkeypatch.setitem(os.environ, "NXDT_BYTES", "\udcff")
    (row,) = report(good, "name=${oc.env:NXDT_BYTES}")
    assert "name: found text with half a character; allowed: text." in row
