"""A distribution of this repository is a folder with a ``pyproject.toml``: every list of them is derived."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.packaging.conftest import DISTS, ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import distributions

HISTORY = ("docs/decisions/", "CHANGELOG.md")
FOLDERS = ("docs", "examples", "nxdt_core", "plugins", "testing")
PAGES = [path for folder in FOLDERS for end in ("md", "py", "tmpl") for path in (ROOT / folder).rglob(f"*.{end}")]
ADVISING = [path for path in (ROOT / "README.md", *PAGES) if not path.relative_to(ROOT).as_posix().startswith(HISTORY)]
"""Files whose texts may say what to install; the others keep the names of their time."""
NAMES = [tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]["name"] for path in DISTS]


def test_install_advice_is_what_the_plugins_of_this_repository_declare():
    written = distributions.OFFERS.read_text()
    assert written == distributions.offers(), "run `make offers`"
    assert {row["dist"] for row in json.loads(written)} == set(NAMES) - {"nxdt-core", "nxdt-testing"}


def test_the_extras_of_the_meta_package_are_the_plugins_and_the_extras_of_the_core():
    written = distributions.META.read_text()
    assert written == distributions.with_extras(written), "run `make offers`"
    extras = tomllib.loads(written)["project"]["optional-dependencies"]
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    plugins = {name.removeprefix("nxdt-plugin-").removeprefix("nxdt-") for name in NAMES} - {"core"}
    assert set(extras) == plugins | set(core) | {"all"}


def test_every_extra_that_a_text_advises_exists():
    projects = [tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in (*DISTS, "meta")]
    existing = {project["name"]: {*project.get("optional-dependencies", {})} for project in projects}
    named, given, wrong = 0, 0, []
    for path in ADVISING:
        text = path.read_text(errors="replace")
        for dist, extras in re.findall(r"\b(nxdt(?:-[a-z0-9-]+)?)\[([\w{},]+)\]", text):
            named += 1
            wrong += [
                f"{path}: {dist}[{each}]" for each in extras.split(",") if each not in {*existing[dist], "{extra}"}
            ]
        for extra in re.findall(r"(?:package|tokenizer)=\"\w+\",\s+extra=\"(\w+)\"", text):
            given += 1
            wrong += [] if extra in existing["nxdt-core"] else [f"{path}: extra={extra}"]
    assert named > 30
    assert given > 5
    assert wrong == []


def test_make_install_has_every_distribution_and_what_its_extras_require():
    command = [sys.executable, ROOT / "scripts" / "distributions.py", "editable"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert [line for line in lines if line.startswith("-e ")] == ["-e .", *(f"-e ./{path}" for path in DISTS[1:])]
    for path in DISTS:
        project = tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]
        for group in project.get("optional-dependencies", {}).values():
            assert {line for line in group if not line.startswith("nxdt-")} <= set(lines)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_builds_a_wheel_of_every_distribution():
    done = subprocess.run(["make", "-n", "wheels"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    (line,) = (line for line in done.stdout.splitlines() if " wheel " in line)
    assert [Path(word) for word in line.partition("--wheel-dir dist ")[2].split()] == [*map(Path, DISTS), Path("meta")]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_demo_needs_a_part_of_the_environment_of_the_tests(tmp_path):
    def printed(target):
        command = ["make", "-n", target, f"VENV={tmp_path}/none"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout

    lean, whole = (
        {word for line in printed(target).splitlines() if " install " in line for word in line.split()}
        for target in ("demo", "test")
    )
    assert {"torch==2.13.0", "-e", ".", "plugins/models/llama", "plugins/datasets/text", "matplotlib"} <= lean < whole
    assert not {word for word in lean if "requirements" in word}


def test_mypy_checks_every_package():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    checked = {path.relative_to(ROOT) for pattern in patterns for path in ROOT.glob(pattern)}
    sources = [Path("nxdt_core"), *(Path(path) / "src" for path in DISTS[1:])]
    assert checked == set(sources)
