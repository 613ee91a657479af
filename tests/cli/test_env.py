"""``nxdt env``: what it finds on this machine, and what it says a run lacks."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch

AWS = "https://pip.repos.neuron.amazonaws.com"


@pytest.fixture
def asked(nxdt):
    """Run the command and read its JSON."""

    def run(*args, **keywords):
        done = nxdt("env", *args, "--json", **keywords)
        return done.returncode, json.loads(done.stdout)

    return run


def install(root: Path, name: str, version: str, code: str) -> None:
    """Put a distribution on the path."""
    module = name.replace("-", "_")
    info = root / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{module}/__init__.py,,\n{info.name}/METADATA,,\n")
    (root / module).mkdir()
    (root / module / "__init__.py").write_text(code)


def test_this_machine_is_described(asked):
    status, found = asked()
    assert status == 0
    devices = {device["type"]: device for device in found["devices"]}
    assert {"cpu", "cuda", "neuron"} <= devices.keys()
    assert (devices["cpu"]["available"], devices["cpu"]["backend_available"]) == (True, True)
    assert devices["neuron"]["static_shapes"]
    versions = {package["name"]: package["version"] for package in found["packages"]}
    assert versions["torch"] == metadata.version("torch")
    assert found["run"] is None


def test_a_run_that_can_start_here(asked):
    status, found = asked("recipe:llama-tiny", "trainer.accelerator=cpu", "trainer.devices=2")
    assert (status, found["run"]["can_start"], found["run"]["problems"]) == (0, True, [])


def test_a_run_that_cannot_start_here_says_what_is_missing(asked):
    status, found = asked("recipe:llama-tiny", "trainer.accelerator=neuron")
    assert status == 1
    (problem,) = found["run"]["problems"]
    assert all(word in problem for word in ("NXDT-P002", "torch-neuronx", "trn1"))


@pytest.mark.parametrize(
    ("override", "said"),
    [("trainer.devices=zero", ("trainer.devices",)), ("trainer.accelerator=abacus", ("NXDT-P001", "'neuron'"))],
)
def test_a_wrong_configuration_is_an_error(nxdt, override, said):
    done = nxdt("env", "recipe:llama-tiny", override)
    assert done.returncode == 2
    assert all(word in done.stderr for word in said)


@pytest.mark.parametrize(
    ("name", "version", "code", "said"),
    [
        ("neuronx-cc", "1.0", "raise ImportError('WRONG PACKAGE. Please install it from AWS')", ("reserves", AWS)),
        ("torch-neuronx", "2.9.0.1", "", ("for torch 2.9", f"torch is {torch.__version__}", "torch-neuronx==")),
        ("torch-xla", "2.1", "", ("for torch 2.1",)),
    ],
)
def test_a_package_that_cannot_be_used_is_named_with_the_right_one(nxdt, site, name, version, code, said):
    """It is not imported: the placeholder would raise."""
    install(site, name, version, code)
    done = nxdt("env", "--json")
    assert done.returncode == 1
    package = next(each for each in json.loads(done.stdout)["packages"] if each["name"] == name)
    assert package["version"] == version
    assert all(words in package["problem"] for words in said)


def test_a_package_of_the_same_torch_is_fine(nxdt, site):
    version = f"{'.'.join(torch.__version__.split('.')[:2])}.3.0"
    install(site, "torch-neuronx", version, "")
    done = nxdt("env")
    assert done.returncode == 0
    assert version in done.stdout


@pytest.mark.parametrize(("environment", "spins"), [({}, False), ({"OMP_WAIT_POLICY": "active"}, True)])
def test_waiting_threads_leave_their_cores_to_other_processes(nxdt, environment, spins):
    """libgomp, which torch brings, prints what it has read when it was loaded."""
    done = nxdt("env", fork=False, OMP_DISPLAY_ENV="verbose", **environment)
    assert done.returncode == 0
    assert ("GOMP_SPINCOUNT = '0'" not in done.stderr) == spins
    assert "GOMP_SPINCOUNT" in done.stderr
