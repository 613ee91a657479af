"""What each wheel holds, and that each dist builds by itself."""

import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser

import pytest

from nxdt_core import __version__
from tests.packaging.conftest import DISTS, ROOT

PROJECTS = {path: tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in DISTS}
OURS = {project["name"].replace("-", "_"): path for path, project in PROJECTS.items()}
"""Folder by name of the package, which is that of the distribution too."""


def _open(wheels, package):
    (path,) = wheels.glob(f"{package}-*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.parametrize("package", OURS)
def test_a_wheel_holds_its_package_types_data_and_licence_and_nothing_else(wheels, package):
    wheel = _open(wheels, package)
    names = wheel.namelist()
    info = f"{package}-{__version__}.dist-info"
    root = ROOT / OURS[package] / ("." if package == "nxdt_core" else "src")
    files = [path for path in (root / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {f"{package}/__init__.py", f"{package}/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    assert {name for name in names if not name.startswith(info)} == {str(path.relative_to(root)) for path in files}
    recorded = wheel.read(f"{info}/RECORD").decode().splitlines()
    assert {line.partition(",")[0] for line in recorded} == set(names)


@pytest.mark.parametrize("package", OURS)
def test_metadata_names_version_licence_and_ranges(wheels, package):
    wheel = _open(wheels, package)
    metadata = Parser().parsestr(wheel.read(f"{package}-{__version__}.dist-info/METADATA").decode())
    assert metadata["Name"] == PROJECTS[OURS[package]]["name"]
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [line.partition(";")[0].strip() for line in metadata.get_all("Requires-Dist", [])]
    assert all("==" not in line for line in required if line.startswith("nxdt"))
    if package != "nxdt_core":
        assert any(line.startswith("nxdt-core") for line in required)


def test_each_plugin_has_one_entry_point_of_its_own_package(wheels):
    for package in OURS:
        if package.startswith("nxdt_plugin_"):
            entries = _open(wheels, package).read(f"{package}-{__version__}.dist-info/entry_points.txt").decode()
            assert entries.split() == ["[nxdt.plugins]", package.removeprefix("nxdt_plugin_"), "=", package]


@pytest.mark.slow
@pytest.mark.parametrize("path", DISTS)
def test_a_wheel_can_be_built_from_the_source_distribution_alone(source, tmp_path, path):
    """What a package index hands out must not need the repository around it.

    In ``test_release.py``, wheels of the core, a plugin and the meta package are built from their unpacked sdists.
    """
    command = (sys.executable, "-m", "build", "--quiet", "--no-isolation", "--outdir", tmp_path, source / path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.split("-")[1] == __version__
