"""The section ``plugins`` is obeyed before any plugin runs; hooks of plugins take part in the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxdt_core import config
from nxdt_core.errors.configuration import ConfigError

PARTS = Path(__file__).parents[1] / "parts.py"


@pytest.fixture
def write(tmp_path, good, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def written(section: str) -> str:
        (tmp_path / "run.yaml").write_text(good + section)
        return "run.yaml"

    return written


def states(resolved):
    return {plugin.name: plugin.state for plugin in resolved.kernel.plugins}


def test_local_files_and_allow_are_read_from_the_section(write):
    resolved = config.load(write(f"plugins:\n  allow: []\n  local: ['{PARTS}']\n"))
    assert states(resolved)["parts"] == "ok"
    assert {state for name, state in states(resolved).items() if name not in ("parts", "builtin")} <= {"blocked"}


def test_a_blocked_plugin_is_not_imported(write, tmp_path):
    (tmp_path / "writes.py").write_text("from pathlib import Path\nPath('written').touch()\n")
    section = f"plugins:\n  allow: []\n  local: ['{PARTS}', writes.py]\n  block: [writes]\n"
    assert states(config.load(write(section)))["writes"] == "blocked"
    assert not (tmp_path / "written").exists()


def test_a_policy_that_is_not_understood_starts_nothing(write, tmp_path):
    (tmp_path / "writes.py").write_text("from pathlib import Path\nPath('written').touch()\n")
    with pytest.raises(ConfigError) as caught:
        config.load(write("plugins:\n  local: [writes.py]\n  block: writes\n"))
    assert [problem.key for problem in caught.value.problems] == ["plugins.block"]
    assert not (tmp_path / "written").exists()


def test_a_missing_local_file_and_lock_are_rows(write):
    (problem,) = config.check(write("plugins:\n  local: [nothing.py]\n"))
    assert problem.row().startswith("run.yaml:14: plugins.local: There is no plugin file")
    (problem,) = config.check(write("plugins:\n  lock: nothing.lock\n"))
    assert problem.row().startswith("run.yaml:14: plugins.lock: The lock file")


@pytest.mark.parametrize(
    ("file", "source", "words"),
    [
        ("boom.py", "1 / 0\n", ("boom.py is broken: ", "raised ZeroDivisionError")),
        ("needs.py", "import not_installed_anywhere\n", ("needs.py is broken: ", "not_installed_anywhere")),
        ("notes.txt", "from pathlib import Path\n", ("notes.txt is broken: ", "is not a Python file")),
        ("sub/parts.py", "", ("parts.py is shadowed: ", "has the same name")),
    ],
)
def test_a_local_file_that_does_not_load_is_an_error_at_its_key(write, tmp_path, file, source, words):
    (tmp_path / "sub").mkdir()
    (tmp_path / file).write_text(source)
    (problem,) = config.check(write(f"plugins:\n  allow: []\n  local: ['{PARTS}', {file}]\n"))
    assert problem.row().startswith("run.yaml:15: plugins.local: the plugin file ")
    assert all(word in problem.row() for word in words)


def test_names_that_match_no_plugin_are_noted(write):
    resolved = config.load(write(f"plugins:\n  allow: []\n  local: ['{PARTS}']\n  prefer: [nobody]\n"))
    assert resolved.notes == ("plugins: no installed plugin is called 'nobody'",)


def test_defaults_of_a_plugin_lie_below_the_file(load, good):
    text = good.replace("name: run", "name: wants-defaults")
    resolved = load(text)
    assert resolved.run.trainer.log_every_n_steps == 7
    assert str(resolved.origins["trainer.log_every_n_steps"]) == "plugin parts"
    assert load(text, "trainer.log_every_n_steps=3").run.trainer.log_every_n_steps == 3


def test_plugins_validate_once_the_types_are_right(report, good):
    (row,) = report(good, "trainer.max_steps=13")
    assert "13 is unlucky" in row
    rows = report(good, "trainer.max_steps=13", "data.global_batch_size=7", "data.micro_batch_size=2")
    assert len(rows) == 2, "rules and findings are told together"
    assert "unlucky" not in "".join(report(good, "trainer.max_steps=13", "seed=x"))


def test_a_plugin_whose_hook_fails_is_named(tmp_path, write):
    (tmp_path / "bad.py").write_text(
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_config_defaults(context):\n    return 1 / 0\n"
    )
    problems = config.check(write(f"plugins:\n  allow: []\n  local: ['{PARTS}', bad.py]\n"))
    assert ["NXDT-K007" in problem.row() and "'bad'" in problem.row() for problem in problems] == [True]


def test_defaults_of_a_plugin_that_are_no_mapping_or_unknown_are_told(tmp_path, write):
    (tmp_path / "bad.py").write_text(
        "from nxdt_core.api import hookimpl\n@hookimpl\ndef nxdt_config_defaults(context):\n"
        "    return {'trainer': {'max_stepps': 3}}\n"
    )
    (problem,) = config.check(write(f"plugins:\n  allow: []\n  local: ['{PARTS}', bad.py]\n"))
    assert problem.row() == (
        "plugin bad: trainer.max_stepps: unknown key. Did you mean 'trainer.max_steps'? [NXDT-C010]"
    )
