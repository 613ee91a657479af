"""A device type that a plugin describes is used by a run that names it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from nxdt_testing.errors import raises

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.distributed.devices import HOST, PROFILES, current_device, register_profile_of
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.errors.launch import BadDeviceProfile
from nxdt_core.errors.plugins import AmbiguousComponent
from nxdt_core.train import build

PLUGIN = """
from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_devices():
    return [Component(name={name!r}, target={target!r})]
"""

PROFILE = """
import torch

from nxdt_core.distributed.device_operations import DeviceOperations
from nxdt_core.distributed.devices import DeviceProfile


class Operations(DeviceOperations):
    def is_available(self, device_type):
        return True

    def current_index(self):
        return 3


PROFILE = DeviceProfile(device_type="abacus", process_group_backend="gloo", operations=Operations())
"""


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """What a test registers is gone afterwards."""
    with patch.dict(PROFILES):
        yield


def config_with(tmp_path: Path, accelerator: str, *, name: str, target: str, prefer: str = "") -> ResolvedConfig:
    (tmp_path / "abacus_plugin.py").write_text(PLUGIN.format(name=name, target=target))
    return load(
        "recipe:llama-tiny",
        [
            f"plugins.local=[{tmp_path / 'abacus_plugin.py'}]",
            f"trainer.accelerator={accelerator}",
            f"plugins.prefer=[{prefer}]",
        ],
    )


@pytest.fixture
def implementation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Reference of a profile's module."""
    (tmp_path / "abacus_device.py").write_text(PROFILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "abacus_device", raising=False)
    return "abacus_device"


def test_the_profile_of_a_plugin_is_registered_for_the_run_that_names_it(tmp_path: Path, implementation: str) -> None:
    target = f"{implementation}:PROFILE"
    register_profile_of(config_with(tmp_path, HOST.type, name="abacus", target=target))
    assert "abacus" not in PROFILES
    register_profile_of(config_with(tmp_path, "abacus", name="abacus", target=target))
    assert PROFILES["abacus"].operations.current_index() == 3


def test_building_an_engine_registers_it(tmp_path: Path, implementation: str) -> None:
    """The engine then takes its device, which torch itself knows nothing of."""
    config = config_with(tmp_path, "abacus", name="abacus", target=f"{implementation}:PROFILE")
    with pytest.raises(RuntimeError, match="abacus"):
        build.engine(config)
    assert "abacus" in PROFILES


def test_a_type_that_nobody_describes_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)trainer.accelerator: .*'slide_rule'.*abacus.*neuron.*\[NXDT-P001\]"):
        config_with(tmp_path, "slide_rule", name="abacus", target="abacus_device:PROFILE")


@pytest.mark.parametrize(
    ("name", "attribute", "found"),
    [("abacus", "Operations", "Operations"), ("counter", "PROFILE", "a profile of 'abacus'")],
)
def test_a_record_that_names_something_else_is_refused(
    tmp_path: Path, implementation: str, name: str, attribute: str, found: str
) -> None:
    config = config_with(tmp_path, name, name=name, target=f"{implementation}:{attribute}")
    with raises(BadDeviceProfile, match=f"(?s)NXDT-P006.*{found}"):
        register_profile_of(config)
    assert name not in PROFILES


def test_two_that_describe_one_type_are_ambiguous_unless_one_is_preferred(tmp_path: Path, implementation: str) -> None:
    source = (tmp_path / "abacus_device.py").read_text().replace('"abacus"', '"neuron"')
    (tmp_path / "abacus_device.py").write_text(source)
    target = f"{implementation}:PROFILE"
    with raises(AmbiguousComponent):
        register_profile_of(config_with(tmp_path, "neuron", name="neuron", target=target))
    register_profile_of(config_with(tmp_path, "neuron", name="neuron", target=target, prefer="abacus_plugin"))
    assert PROFILES["neuron"].process_group_backend == "gloo"
    assert current_device(HOST.type) == HOST
