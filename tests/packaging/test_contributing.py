"""What ``CONTRIBUTING.md`` and the hooks of pre-commit name exists."""

import re
import shutil
import subprocess

import pytest
import yaml

from tests.packaging.conftest import ROOT


def test_paths_of_the_page_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"[`( ]((?:nxdt_core|tests|docs|plugins)/[\w./]+)", text)
    links = re.findall(r"\]\(([\w./]+)\)", text)
    assert len(named) > 10
    assert [path for path in (*named, *links) if not (ROOT / path).exists() and "NAME" not in path] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_hooks_before_a_commit_are_the_commands_of_make_lint():
    done = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in local["hooks"]]
    assert entries == [line for line in done.stdout.splitlines() if line.startswith(".venv/bin/")][-len(entries) :]
    assert len(entries) == done.stdout.count("/ruff ") + done.stdout.count("/mypy") + done.stdout.count(
        "scripts/prose.py"
    )
