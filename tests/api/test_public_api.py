"""The public names are those of a page, with the signatures of a file; examples and new plugins need no others."""

import ast
import json
import os
import re
import sys
import zipfile

import pytest

from nxdt_core import __version__
from nxdt_core.scaffold.repository import kind_names, write_repository
from scripts import public_api
from scripts.wheel_environment import build_wheels
from tests import processes

ROOT = public_api.ROOT
STANDALONE = (
    *("llama", "gpt", "mixtral", "text", "sft_chat", "hf_data", "s3", "fsx", "torchao", "evaluate", "ray"),
    *("nxd_core", "engines/nxd", "migration/nxd"),
)
"""Plugins that use public names alone, so that their source shows what a third party can do."""


def test_the_public_names_have_the_signatures_of_the_file():
    found = public_api.difference()
    assert not found, f"{found}\nIf this is intended, run `make api` and name it in CHANGELOG.md."


def test_the_public_names_can_be_reviewed():
    names = [f"{module}.{name}" for module, names in public_api.public_names().items() for name in names]
    assert 300 < len(names) <= 400
    assert len(names) == len(set(names))


def internal(source):
    """Names of nxdt that a Python text imports and that are not public."""
    public = public_api.public_names()
    return {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("nxdt_core", "nxdt_testing"))
        for alias in node.names
        if alias.name not in public.get(node.module, ()) and f"{node.module}.{alias.name}" not in public
    }


def test_an_internal_name_is_found():
    assert internal("from nxdt_core.cli.app import main") == {"nxdt_core.cli.app.main"}


PYTHON = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_pages_import_public_names_alone():
    blocks = {
        f"{path.relative_to(ROOT)}: {block[:60]!r}": block
        for path in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("plugins/*/*/README.md"), ROOT / "README.md"]
        if "decisions" not in path.parts
        for block in PYTHON.findall(path.read_text())
    }
    assert len(blocks) > 25
    parsed = {name: ast.unparse(ast.parse(block)) for name, block in blocks.items() if "…" not in block}
    assert {name: found for name, block in parsed.items() if (found := internal(block))} == {}


@pytest.mark.parametrize("plugin", STANDALONE)
def test_a_plugin_that_others_begin_with_imports_public_names_alone(plugin):
    files = [path for path in ROOT.glob("plugins/*/*/src/**/*.py") if f"/{plugin}/src/" in path.as_posix()]
    assert files
    found = {str(path.relative_to(ROOT)): internal(path.read_text()) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("kind", kind_names())
def test_a_new_plugin_imports_public_names_alone(kind, tmp_path):
    write_repository(kind, "acme", tmp_path / "acme")
    files = list((tmp_path / "acme").rglob("*.py"))
    assert files
    assert {path.name: names for path in files if (names := internal(path.read_text()))} == {}


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """``older(requirement)``: a directory with the contents of a wheel, of a plugin that requires this core."""
    place = tmp_path_factory.mktemp("older")
    write_repository("optimizer", "older", place / "source")
    build_wheels([place / "source"], place / "wheels")
    (wheel,) = (place / "wheels").iterdir()

    def install(requirement):
        site = tmp_path_factory.mktemp("site")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        (metadata,) = site.glob("older-*.dist-info/METADATA")
        text, replaced = re.subn(r"(?m)^(Requires-Dist: )nxdt-core.*$", rf"\1{requirement}", metadata.read_text())
        assert replaced == 1
        metadata.write_text(text)
        return site

    return install


@pytest.mark.parametrize(
    ("requires", "state"), [("nxdt-core>={previous},<1", "ok"), ("nxdt-core>={previous},<{this}", "incompatible")]
)
def test_a_plugin_of_the_previous_minor_version_loads_where_its_range_admits_the_core(tmp_path, older, requires, state):
    major, minor = map(int, __version__.split(".")[:2])
    requirement = requires.format(previous=f"{major}.{minor - 1}", this=f"{major}.{minor}")
    path = os.pathsep.join([str(older(requirement)), *filter(None, [os.environ.get("PYTHONPATH")])])

    def nxdt(*words):
        command = [sys.executable, "-m", "nxdt_core", *words]
        environment = {**os.environ, "PYTHONPATH": path}
        return processes.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    (row,) = [row for row in json.loads(nxdt("plugins", "list", "--json").stdout) if row["name"] == "older"]
    assert row["state"] == state
    words = ("recipe:llama-tiny", "model.optim.name=older", "model.optim.momentum=0.5")
    checked = nxdt("config", "check", *words)
    if state == "incompatible":
        assert all(bound in row["reason"] for bound in requirement.removeprefix("nxdt-core").split(","))
        assert __version__ in row["reason"]
        assert checked.returncode == 2
        assert "incompatible" in checked.stderr, checked.stderr
    else:
        assert row["components"] == [{"kind": "optimizer", "name": "older"}]
        assert checked.returncode == 0, checked.stderr
