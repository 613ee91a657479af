"""The public surface is that of a file, whose changes are reviewed; plugins of this repository use nothing else."""

import ast
import json
import os
import re
import sys
import zipfile
from pathlib import Path

import pytest

from nxdt_core import __version__
from nxdt_core.scaffold.repository import write_repository
from scripts import public_api
from scripts.wheel_environment import build_wheels
from tests import processes

ROOT = Path(__file__).parents[2]


def test_the_public_surface_is_that_of_the_file():
    found = public_api.compare(public_api.GOLDEN.read_text().splitlines(), public_api.surface())
    assert not found, public_api.report(found)


@pytest.fixture(scope="module")
def lines():
    return public_api.GOLDEN.read_text().splitlines()


def test_every_room_of_the_page_exists():
    names = set(public_api.modules())
    for room in public_api.rooms():
        assert room.endswith(".*") or room in names, room
        assert [name for name in names if public_api.is_public(name, [room])], room


@pytest.mark.parametrize(
    ("old", "new", "breaking", "before_one", "after_one"),
    [
        ([], ["function a.f : -> None"], False, "patch", "minor"),
        (["function a.f : -> None"], [], True, "minor", "major"),
        (["function a.f : -> None"], ["function a.f : -> int"], True, "minor", "major"),
        (["function a.f : -> None"], ["function a.f : -> None", "parameter a.f(x) : int = 1"], False, "patch", "minor"),
        (["function a.f : -> None"], ["function a.f : -> None", "parameter a.f(x) : int"], True, "minor", "major"),
        ([], ["function a.f : -> None", "parameter a.f(x) : int"], False, "patch", "minor"),
        (["protocol a.P"], ["protocol a.P", "member a.P.m : (self) -> None"], True, "minor", "major"),
        ([], ["protocol a.P", "member a.P.m : (self) -> None"], False, "patch", "minor"),
        (["class a.R"], ["class a.R", "parameter a.R(x) : int = 1"], False, "patch", "minor"),
        ([], ["class a.R", "parameter a.R(x) : int"], False, "patch", "minor"),
        (["key a.b : an integer = 1"], ["key a.b : an integer = 2"], True, "minor", "major"),
        ([], ["key a.c : an integer"], True, "minor", "major"),
        ([], ["hook nxdt_new : -> None"], False, "patch", "minor"),
        (["command nxdt x"], ["command nxdt x", "argument nxdt x file : required"], True, "minor", "major"),
        ([], ["command nxdt x", "argument nxdt x file : required"], False, "patch", "minor"),
        (["error NXDT-C001 : x.Y"], [], True, "minor", "major"),
    ],
)
def test_a_difference_says_which_part_of_the_version_rises(old, new, breaking, before_one, after_one):
    found = public_api.compare(old, new)
    assert any(each.breaking for each in found) is breaking
    assert public_api.verdict(found, "0.1.0") == before_one
    assert public_api.verdict(found, "1.4.0") == after_one


def test_a_report_names_the_difference_and_what_to_do(lines):
    gone = next(line for line in lines if line.startswith("hook nxdt_callbacks "))
    text = public_api.report(public_api.compare(lines, [line for line in lines if line != gone]))
    assert f"BREAKING removed: {gone}" in text
    assert "The minor version rises" in text
    assert "make api" in text


def test_the_file_has_records_protocols_hooks_keys_commands_and_errors(lines):
    for expected in (
        "parameter nxdt_core.api.ModelComponent(hf_architectures)",
        "member nxdt_core.protocols.model.ModelBuilder.plan",
        "argument nxdt_validate_config(context)",
        "key trainer.max_steps",
        "command nxdt plugins list",
        "option nxdt plugins list --json",
        "error NXDT-C001",
        "class nxdt_testing.model_contract.ModelContract",
    ):
        assert any(line.startswith(expected) for line in lines), expected


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def test_plugins_of_this_repository_import_public_modules_alone():
    listed, known = public_api.rooms(), public_api.modules()
    private = []
    for path in ROOT.glob("plugins/*/*/src/**/*.py"):
        for module, name in _imports(path):
            if module.partition(".")[0] != "nxdt_core":
                continue
            whole = f"{module}.{name}"
            if not public_api.is_public(whole if whole in known else module, listed) or name.startswith("_"):
                private.append(f"{path.relative_to(ROOT)}: {whole}")
    assert private == []


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """``older(requirement)``: a directory with the contents of a wheel, of a plugin that requires this core.

    The plugin imports a module that is deprecated, as one that was written for the previous minor version may.
    """
    place = tmp_path_factory.mktemp("older")
    write_repository("optimizer", "older", place / "source")
    config = place / "source" / "src" / "older" / "config.py"
    text = config.read_text()
    assert "nxdt_core.config.annotations" in text
    config.write_text(text.replace("nxdt_core.config.annotations", "nxdt_core.config.marks"))
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

    def nxdt(*words, options=()):
        command = [sys.executable, *options, "-m", "nxdt_core", *words]
        environment = {**os.environ, "PYTHONPATH": path}
        return processes.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    (row,) = [row for row in json.loads(nxdt("plugins", "list", "--json").stdout) if row["name"] == "older"]
    assert row["state"] == state
    words = ("recipe:llama-tiny", "model.optim.name=older", "model.optim.momentum=0.5")
    warned = ("-W", "default") if state == "ok" else ()
    checked = nxdt("config", "check", *words, options=warned)
    if state == "incompatible":
        assert all(bound in row["reason"] for bound in requirement.removeprefix("nxdt-core").split(","))
        assert __version__ in row["reason"]
        assert checked.returncode == 2
        assert "incompatible" in checked.stderr, checked.stderr
    else:
        assert row["components"] == [{"kind": "optimizer", "name": "older"}]
        assert checked.returncode == 0, checked.stderr
        warning = "nxdt_core.config.marks is deprecated and goes in nxdt-core 0.3. Use nxdt_core.config.annotations."
        assert re.search(rf"older/config\.py:\d+: NxdtDeprecationWarning: {re.escape(warning)}", checked.stderr)
