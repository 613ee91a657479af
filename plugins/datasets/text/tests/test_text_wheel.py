"""What a user installs holds the data, the note of its origin, and the entry point."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="hatchling, which builds wheels, is not installed")
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, timeout=120)
    (path,) = directory.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_text_and_the_note_of_its_origin_and_licence_are_in_the_wheel(wheel):
    text = wheel.read("nxdt_plugin_text/data/kjv.txt").decode("ascii")
    assert 1_000_000 < len(text) < 1_500_000
    assert "public domain" in wheel.read("nxdt_plugin_text/data/README.md").decode()


def test_the_wheel_declares_the_plugin_and_its_types(wheel):
    names = wheel.namelist()
    assert "nxdt_plugin_text/py.typed" in names
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "[nxdt.plugins]\ntext = nxdt_plugin_text" in wheel.read(entry_points).decode()
    assert not [name for name in names if "test" in name]
