"""What ``CONTRIBUTING.md`` and the hooks of pre-commit name exists."""

import inspect
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from nxdt_testing.processes.rank_worker import import_module

from tests.packaging.conftest import ROOT


def test_paths_of_the_page_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"[`( ]((?:nxdt_core|tests|docs|plugins)/[\w./]+)", text)
    links = re.findall(r"\]\(([\w./]+)\)", text)
    assert len(named) > 10
    assert [path for path in (*named, *links) if not (ROOT / path).exists() and "NAME" not in path] == []


@pytest.fixture(scope="module")
def smallest(tmp_path_factory):
    """The module of the smallest tests, as a reader would save it."""
    path = tmp_path_factory.mktemp("smallest") / "test_smallest.py"
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    path.write_text(code)
    yield import_module(path.stem, str(path))
    del sys.modules[path.stem]


@pytest.mark.parametrize("named", ["two_tensor", "resumes", "misspelt"])
def test_the_smallest_tests_pass(smallest, named, tmp_path, capsys):
    (test,) = (value for name, value in vars(smallest).items() if name.startswith("test_") and named in name)
    fixtures = {"tmp_path": tmp_path, "capsys": capsys}
    test(**{name: fixtures[name] for name in inspect.signature(test).parameters})


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_hooks_before_a_commit_are_the_commands_of_make_lint():
    done = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in local["hooks"]]
    assert entries == [line for line in done.stdout.splitlines() if line.startswith(".venv/bin/")][-len(entries) :]
    assert len(entries) == done.stdout.count("/ruff ") + done.stdout.count("/mypy") + done.stdout.count(
        "scripts/prose.py"
    )
