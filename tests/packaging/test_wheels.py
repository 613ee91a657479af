"""What each wheel holds, and that each dist builds by itself."""

import subprocess
import sys
import zipfile
from email.parser import Parser

import pytest

from nxdt_core import __version__
from nxdt_core.kernel import Kernel
from nxdt_core.kernel.known import known_offers
from tests.packaging.conftest import DISTS
from tests.sampling import slow_except

OURS = {
    "nxdt_core": ("nxdt-core", ("nxdt_core/api.py", "nxdt_core/cli/app.py", "nxdt_core/data/templates/chatml.jinja")),
    "nxdt_plugin_evaluate": ("nxdt-plugin-evaluate", ("nxdt_plugin_evaluate/rouge.py",)),
    "nxdt_plugin_fsx": ("nxdt-plugin-fsx", ("nxdt_plugin_fsx/lfs.py",)),
    "nxdt_plugin_s3": ("nxdt-plugin-s3", ("nxdt_plugin_s3/storage.py",)),
    "nxdt_plugin_hf_data": ("nxdt-plugin-hf-data", ("nxdt_plugin_hf_data/data/kjv/train/state.json",)),
    "nxdt_plugin_megatron_data": ("nxdt-plugin-megatron-data", ("nxdt_plugin_megatron_data/reader.py",)),
    "nxdt_plugin_sft_chat": ("nxdt-plugin-sft-chat", ("nxdt_plugin_sft_chat/data/chats.jsonl",)),
    "nxdt_plugin_text": ("nxdt-plugin-text", ("nxdt_plugin_text/data/kjv.txt",)),
    "nxdt_plugin_gpt": ("nxdt-plugin-gpt", ("nxdt_plugin_gpt/recipes/gpt-tiny.yaml",)),
    "nxdt_plugin_hf": ("nxdt-plugin-hf", ("nxdt_plugin_hf/configs/qwen3-tiny/config.json",)),
    "nxdt_plugin_lora": ("nxdt-plugin-lora", ("nxdt_plugin_lora/recipes/llama-tiny-lora.yaml",)),
    "nxdt_plugin_llama": ("nxdt-plugin-llama", ("nxdt_plugin_llama/recipes/llama-tiny.yaml",)),
    "nxdt_plugin_migrate": ("nxdt-plugin-migrate", ("nxdt_plugin_migrate/config/nxdt.py",)),
    "nxdt_plugin_mixtral": ("nxdt-plugin-mixtral", ("nxdt_plugin_mixtral/recipes/mixtral-tiny.yaml",)),
    "nxdt_plugin_preference": ("nxdt-plugin-preference", ("nxdt_plugin_preference/recipes/llama-tiny-dpo.yaml",)),
}


def test_an_advice_to_install_names_a_dist_of_this_repository_that_offers_the_component():
    registry = Kernel.start().registry
    advised = [(kind.name, dist, names) for kind in registry.kinds() for dist, names in known_offers(kind.name).items()]
    assert len(advised) > 10
    for kind, dist, names in advised:
        records = [each.record for each in registry.all(kind) if each.dist == dist]
        offered = {name for record in records for name in (record.name, *record.aliases)}
        assert set(names) <= offered, (kind, dist)


def _open(wheels, package):
    (path,) = wheels.glob(f"{package}-*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.parametrize("package", OURS)
def test_a_wheel_holds_its_package_types_data_and_licence_and_nothing_else(wheels, package):
    names = _open(wheels, package).namelist()
    info = f"{package}-{__version__}.dist-info"
    for wanted in (f"{package}/__init__.py", f"{package}/py.typed", f"{info}/licenses/LICENSE", *OURS[package][1]):
        assert wanted in names, wanted
    assert {name.partition("/")[0] for name in names} == {package, info}
    assert not [name for name in names if "test" in name.split("/") or name.endswith(".pyc")]


@pytest.mark.parametrize("package", OURS)
def test_metadata_names_version_licence_and_ranges(wheels, package):
    wheel = _open(wheels, package)
    metadata = Parser().parsestr(wheel.read(f"{package}-{__version__}.dist-info/METADATA").decode())
    assert metadata["Name"] == OURS[package][0]
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [line.partition(";")[0].strip() for line in metadata.get_all("Requires-Dist", [])]
    assert all("==" not in line for line in required if line.startswith("nxdt"))
    if package != "nxdt_core":
        assert any(line.startswith("nxdt-core") for line in required)


def test_each_plugin_has_one_entry_point_of_its_own_package(wheels):
    for package in OURS:
        if package != "nxdt_core":
            entries = _open(wheels, package).read(f"{package}-{__version__}.dist-info/entry_points.txt").decode()
            assert entries.split() == ["[nxdt.plugins]", package.removeprefix("nxdt_plugin_"), "=", package]


@pytest.mark.parametrize("path", slow_except(DISTS, (".", "plugins/models/hf")))
def test_a_wheel_can_be_built_from_the_source_distribution_alone(source, tmp_path, path):
    """What a package index hands out must not need the repository around it."""
    command = (sys.executable, "-m", "build", "--quiet", "--no-isolation", "--outdir", tmp_path, source / path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.split("-")[1] == __version__
