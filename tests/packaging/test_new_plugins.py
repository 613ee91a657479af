"""``nxdt plugins new`` writes repositories whose wheels pass their own tests."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from nxdt_testing.errors import raises

from nxdt_core.api import KINDS
from nxdt_core.cli.plugins import new
from nxdt_core.errors.plugins import KindHasNoTemplates
from nxdt_core.scaffold import repository
from nxdt_core.scaffold.repository import kind_names, write_repository
from scripts.wheel_environment import build_wheels
from tests import processes
from tests.packaging.conftest import ROOT
from tests.sampling import sampled, takes_all

TEMPLATES = Path(repository.__file__).with_name("templates")
OTHERS = sorted({kind.name for kind in KINDS if (TEMPLATES / kind.name).is_dir()} - {"model"})
PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
QUICK = "not (in_a_layout or shards_are or layouts_agree or ranks)"


def _python(*words, cwd, path):
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    return processes.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)


def _chosen(config):
    return ["model", "plain model", *sampled(config, OTHERS, 1, of="new plugins")]


@pytest.fixture(scope="module")
def site(tmp_path_factory, pytestconfig):
    """A directory into which the wheels of the chosen kinds are unpacked, and their repositories by kind."""
    place = tmp_path_factory.mktemp("new")
    written = {kind: place / f"my-{kind.replace(' ', '-')}" for kind in _chosen(pytestconfig)}
    for kind, directory in written.items():
        write_repository(kind.removeprefix("plain "), directory.name, directory, plain=kind.startswith("plain"))
    wheels = place / "wheels"
    wheels.mkdir()
    build_wheels(written.values(), wheels)
    for wheel in wheels.iterdir():
        zipfile.ZipFile(wheel).extractall(place / "site")
    for directory in written.values():
        shutil.rmtree(directory / "src")  # the tests shall find the wheel
    return place / "site", written


@pytest.fixture(scope="module")
def outcomes(site, pytestconfig):
    """Lines of pytest, which by default runs quick tests of both repositories in one process."""
    path, written = site
    samples = f"--samples={pytestconfig.getoption('samples')}"
    options = ("-v", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={path.parent}", samples)
    tests = [directory / "tests" for directory in written.values()]
    runs = [[each] for each in tests] if takes_all(pytestconfig) else [[*tests, "-k", QUICK]]
    lines = []
    for run in runs:
        done = _python("-c", PYTEST, *options, *run, cwd=path.parent, path=path)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        lines += done.stdout.splitlines()
    return lines


@pytest.mark.parametrize("kind", ["model", "plain model", "another"])
def test_a_new_repository_passes_its_own_tests(site, outcomes, kind):
    _, written = site
    chosen = [kind] if kind in written else [each for each in written if not each.endswith("model")]
    for each in chosen:
        passed = [line for line in outcomes if f"{written[each].name}/tests/" in line and " PASSED" in line]
        assert len(passed) > 5, each


def test_a_new_plugin_is_usable_and_nothing_of_it_is_complained_of(site, tmp_path):
    path, written = site
    done = _python("-m", "nxdt_core", "plugins", "list", "--json", cwd=tmp_path, path=path)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    for kind, directory in written.items():
        row = rows[directory.name]
        assert row["state"] == "ok"
        assert [component["kind"] for component in row["components"]] == [kind.removeprefix("plain ")]
    assert "my-" not in done.stderr


def test_the_engine_of_a_new_repository_is_the_example(tmp_path):
    write_repository("engine", "my-engine", tmp_path / "mine")
    example = (ROOT / "examples/one_process_engine/src/acme_engine/engine.py").read_text()
    written = (tmp_path / "mine/src/my_engine/engine.py").read_text()
    assert written.replace("MyEngine", "Solo") == example
    write_repository("store", "sqlite", tmp_path / "store")
    example = (ROOT / "examples/third_party/src/acme_nxdt/store.py").read_text()
    assert (tmp_path / "store/src/sqlite/store.py").read_text().replace("Sqlite", "SQLiteStore") == example


def test_every_kind_has_templates_and_code_of_one_style(tmp_path):
    for kind, plain in (*((each, False) for each in kind_names()), ("model", True)):
        files = write_repository(kind, "my-own", tmp_path / f"{kind}-{plain}", plain=plain)
        assert {"README.md", "pyproject.toml", "tests/test_plugin.py"} <= set(map(str, files))
        for file in files:
            text = (tmp_path / f"{kind}-{plain}" / file).read_text()
            assert "{{" not in text.replace("${{", "")
            assert not re.search(r"^\w+: \{|^nxdt ", text if file.name == "README.md" else "", re.MULTILINE), "not code"
            assert "raise ValueError" not in text, "a mistake of a user needs an NxdtError"
            modules = re.findall(r"^from (\S+) import ", text, re.MULTILINE)
            assert len(modules) == len({*modules}), f"{file} imports a module twice"
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E,F,UP,B", "--line-length", "125"]
    done = subprocess.run([*ruff, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("modle", "my-model"), "NXDT-K004", "'model'"),
        (("model", "My Model"), "NXDT-K036", "my-model"),
        (("model", "nxdt-plugin-mine"), "NXDT-K036", "nxdt"),
        (("model", "taken"), "NXDT-K035", "--directory"),
    ],
)
def test_what_cannot_be_written_is_an_error(tmp_path, words, code, said):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    command = [sys.executable, "-m", "nxdt_core", "plugins", "new", *words]
    process = processes.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert f"[{code}]" in err
    assert said in err


def test_the_help_names_kinds_that_there_are():
    named = re.search(r"such as (.*?)\. NAME", " ".join(new.callback.__doc__.split())).group(1)
    assert {*re.split(", | or ", named)} <= {*kind_names()}


def test_a_kind_without_templates_is_an_error(tmp_path, monkeypatch):
    """A kind of the core may have none, and every folder of templates is of a kind."""
    assert {path.name for path in TEMPLATES.iterdir()} == {"common", "model", "plain_model", *OTHERS}
    notifier = replace(KINDS[0], name="notifier")
    monkeypatch.setattr(repository, "KINDS", (*KINDS, notifier))
    with raises(KindHasNoTemplates, match="'notifier'") as caught:
        write_repository("notifier", "my-notifier", tmp_path / "my-notifier")
    assert "notifier" not in caught.value.available
    assert not (tmp_path / "my-notifier").exists()


def test_the_command_says_how_to_continue(tmp_path):
    command = [sys.executable, "-m", "nxdt_core", "plugins", "new", "schedule", "my-schedule"]
    process = processes.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1] == "cd my-schedule && pip install . && nxdt plugins check ."
    for line in out.splitlines()[:-2]:
        assert (tmp_path / line).is_file()
