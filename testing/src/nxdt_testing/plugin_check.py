"""Runs the contracts that apply to an installed plugin, for ``nxdt plugins check``.

Which ones apply follows from its records: that of plugins always; those of metrics and device profiles; those of
optimizers, learning-rate schedules, precision policies, objectives, adapters and launchers for each such component
whose section has defaults; that of models for each model of a recipe ``…-tiny``, in the sizes of the recipe. The others
run where the plugin's own tests are: give ``nxdt plugins check`` their directory.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.config.section import REQUIRED, keys_of
from nxdt_core.config.sources import list_recipes
from nxdt_core.errors import NxdtError
from nxdt_core.errors.plugins import UnknownPlugin
from nxdt_core.kernel import Kernel
from nxdt_core.kernel.plugin import names
from nxdt_core.kernel.registry import RegisteredComponent
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.train import build
from nxdt_testing.adapter_contract import AdapterContract
from nxdt_testing.device_contract import DeviceContract
from nxdt_testing.launcher_contract import LauncherContract
from nxdt_testing.metric_contract import MetricContract
from nxdt_testing.model_contract import ModelContract
from nxdt_testing.objective_contract import ObjectiveContract
from nxdt_testing.optimizer_contract import OptimizerContract
from nxdt_testing.plugin_contract import PluginContract
from nxdt_testing.precision_contract import PrecisionContract
from nxdt_testing.runs.layouts import planned_capabilities
from nxdt_testing.schedule_contract import ScheduleContract

__all__ = ["Result", "check_directory", "check_plugin", "contracts"]

_FILE = "from nxdt_testing.plugin_check import contracts\n\nglobals().update(contracts({name!r}))\n"
_QUIET = ("-o", "addopts=", "-p", "no:terminal", "-p", "no:cacheprovider", "--import-mode=importlib")
_CONTRACTS: Mapping[str, tuple[type, Callable[[Any], Mapping[str, Any]]]] = {
    "optimizer": (OptimizerContract, lambda record: {"sharded": "sharded" in record.capabilities}),
    "schedule": (ScheduleContract, lambda record: {}),
    "precision": (PrecisionContract, lambda record: {}),
    "objective": (ObjectiveContract, lambda record: {}),
    "adapter": (AdapterContract, lambda record: {"name": record.name}),
    "launcher": (LauncherContract, lambda record: {"name": record.name}),
    "metric": (MetricContract, lambda record: {}),
    "device": (DeviceContract, lambda record: {"name": record.name}),
}
"""Contract of a kind, and what a record says for it."""
_RATE = 0.01
_TINY = "-tiny"
"""End of the names of recipes whose models take seconds."""
_UNWRITTEN = "to be described in a line"
"""Text in the summaries of ``nxdt plugins new``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one requirement."""

    of: str
    """The plugin or component that it is about, or a test file."""
    requirement: str
    """The requirement as a sentence."""
    state: str
    """``pass``, ``skip`` or ``fail``."""
    text: str = ""
    """Reason of a failure or skip, in one line."""


def check_plugin(name: str) -> list[Result]:
    """Run the contracts of the plugin or distribution ``name``; a component that none is run for is a skip.

    Raises:
        UnknownPlugin: nothing of that name is installed.
    """
    kernel = Kernel.start()
    meant = [plugin for plugin in kernel.plugins if names(name, name=plugin.name, dist=plugin.dist)]
    if not meant:
        raise UnknownPlugin(name=name, available=tuple(dict.fromkeys(plugin.name for plugin in kernel.plugins)))
    with tempfile.TemporaryDirectory(prefix="nxdt-check-") as directory:
        file = Path(directory) / "test_plugin.py"
        file.write_text(_FILE.format(name=meant[0].name), encoding="utf-8")
        settings = Path(directory) / "pytest.ini"  # empty, so that none are taken from the working directory
        settings.write_text("[pytest]\n", encoding="utf-8")
        found = _run(str(file), f"--rootdir={directory}", "-c", str(settings))
    kinds = kernel.registry.kinds()
    own = [each for kind in kinds for each in kernel.registry.all(kind.name) if each.plugin == meant[0].name]
    unwritten = [each.record.name for each in own if _UNWRITTEN in each.record.summary]
    if unwritten:
        text = f"the summary of {', '.join(unwritten)} is that of the template"
        found.append(Result(of="plugin", requirement="its summaries are written", state="fail", text=text))
    tested = {each.of for each in found}
    rest = [name for name in (f"{each.kind} {each.record.name}" for each in own) if name not in tested]
    reason = "it needs what its author chooses: run the tests of its repository, nxdt plugins check DIRECTORY"
    return [*found, *(Result(of=each, requirement="it keeps its contract", state="skip", text=reason) for each in rest)]


def check_directory(path: Path) -> list[Result]:
    """Run the tests of a plugin's repository: those in ``tests``, where there is such a directory.

    They can import what is next to them and in ``path``, such as a local plugin file.
    """
    tests = path / "tests"
    tests = tests if tests.is_dir() else path
    with mock.patch.object(sys, "path", [str(tests.resolve()), str(path.resolve()), *sys.path]):
        return _run(str(tests))


def contracts(plugin: str, kernel: Kernel | None = None) -> dict[str, type]:
    """Return test classes by name, one for each contract that applies to an installed plugin of a kernel."""
    contracts: dict[str, type] = {"Test plugin": type("Contract", (PluginContract,), {"plugin": plugin})}
    kernel = kernel or Kernel.start()
    for kind, (contract, members) in _CONTRACTS.items():
        for component in kernel.registry.all(kind):
            if component.plugin == plugin:
                contracts[f"Test {kind} {component.record.name}"] = _of(contract, component, members(component.record))
    for recipe in list_recipes(kernel):
        if recipe.plugin == plugin and recipe.name.endswith(_TINY):
            try:
                config = load(f"recipe:{plugin}:{recipe.name}", kernel=kernel)
            except NxdtError:  # the contract of the plugin reports it, and the others still run
                continue
            model = config.selected("model").component
            if model.plugin == plugin:
                contracts.setdefault(f"Test model {model.record.name}", _of_model(config, model))
    return contracts


def _of_model(config: ResolvedConfig, component: RegisteredComponent) -> type:
    @pytest.fixture
    def builder(self: Any) -> ModelBuilder:
        return build.model_builder(config)

    declared = component.record.capabilities
    if getattr(component.record, "tried_before_launch", False):  # its plan, and so what it can do, depends on its keys
        declared &= planned_capabilities(build.model_builder(config).plan()) | {"lora"}
    return type("Contract", (ModelContract,), {"builder": builder, "capabilities": declared})


def _of(contract: type, component: RegisteredComponent, members: Mapping[str, Any]) -> type:
    @pytest.fixture
    def target(self: Any) -> Any:
        return component.load_target()

    @pytest.fixture
    def section(self: Any) -> Any:
        return _section(component)

    fixtures = {"factory": target, "profile": target, "section": section, "options": section}
    return type("Contract", (contract,), {**fixtures, **members})


def _section(component: RegisteredComponent) -> Any:
    """The section with its defaults; a rate and a decay where it has such keys, and no dropout."""
    cls = component.load_config()
    if cls is None:
        return None
    keys = keys_of(cls)
    values = {name: value for name, value in {"lr": _RATE, "weight_decay": 0.1}.items() if name in keys}
    values |= {name: 0.0 for name in keys if name == "dropout" or name.endswith("_dropout")}
    required = [name for name, key in keys.items() if key.default is REQUIRED]
    missing = [name for name in required if name not in values]
    if missing:
        pytest.skip(f"{cls.__name__} has no default for {', '.join(missing)}: subclass the contract in your tests")
    return cls(**values)


def _run(*arguments: str) -> list[Result]:
    collected = _Collected()
    pytest.main([*arguments, *_QUIET], plugins=[collected])
    return collected.results


class _Collected:
    """Pytest plugin that keeps how each test ended."""

    def __init__(self) -> None:
        self.results: list[Result] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the outcome of a test, or of what it needs where that fails."""
        if report.when != "call" and not report.skipped and not report.failed:
            return
        file, *path = report.nodeid.split("::")
        state = {"passed": "pass", "skipped": "skip"}.get(report.outcome, "fail")
        of = path[0].removeprefix("Test").strip() if len(path) > 1 else Path(file).name
        words = path[-1].removeprefix("test_").replace("_", " ")
        text = "" if state == "pass" else _last(report)
        self.results.append(Result(of=of, requirement=words, state=state, text=text))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Take a file that cannot be imported."""
        if report.failed:
            self.results.append(
                Result(of=report.nodeid, requirement="it can be imported", state="fail", text=_last(report))
            )


def _last(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason of a skip, or what was raised, in one line."""
    representation: Any = report.longrepr
    if isinstance(representation, tuple):
        return str(representation[2]).removeprefix("Skipped: ")
    crash = getattr(representation, "reprcrash", None)
    text = str(crash.message if crash is not None else representation).strip().splitlines() or [""]
    if text[0] == "AssertionError":  # an assertion without a message: the statement says what did not hold
        lines = getattr(representation.reprtraceback.reprentries[-1], "lines", ())
        text = [line[1:].strip() for line in lines if line.startswith(">")] or text
    return text[0].removeprefix("AssertionError: ").removeprefix("Failed: ")
