"""Every hook is documented with an example that works."""

from __future__ import annotations

import ast
import inspect
import re
from textwrap import dedent

import pytest

from nxdt_core import api
from nxdt_core.kernel.declaration import declare
from nxdt_core.kernel.hooks import collect_hooks, new_manager, register
from nxdt_core.kernel.hookspecs import PHASES, registration
from nxdt_core.kernel.plugin import PluginInfo

HOOKS = [pytest.param(phase, name, id=name) for phase in PHASES for name in phase.__all__]
EXAMPLE = PluginInfo(name="example", dist="example", version="1", module="example", location="")


def example_of(phase, name: str) -> str:
    before, found, code = inspect.getdoc(getattr(phase, name)).partition("Example::\n")
    assert found, f"{name} has no example"
    assert len(before.strip()) > 30, f"{name} is not explained"
    return dedent(code)


class ExampleModule:
    """Holds what an example defines, as a plugin's module does."""


def collected(phase, name: str):
    namespace = dict(vars(api))
    exec(example_of(phase, name), namespace)
    plugin = ExampleModule()
    setattr(plugin, name, namespace[name])
    return collect_hooks(EXAMPLE, plugin)


@pytest.mark.parametrize(("phase", "name"), HOOKS)
def test_the_example_implements_the_hook(phase, name):
    assert vars(collected(phase, name)).keys() == {name}


@pytest.mark.parametrize("name", registration.__all__)
def test_the_example_of_a_registration_hook_registers(name):
    manager = new_manager()
    register(manager, [(EXAMPLE, collected(registration, name))])
    declaration = declare(EXAMPLE, manager.hook)
    declared = bool(declaration.components) + bool(declaration.kinds) + bool(declaration.added)
    assert declared == (name != "nxdt_cli")


def test_every_kind_of_the_kernel_has_its_registration_hook():
    assert set(registration.__all__) >= {kind.hook for kind in api.KINDS}


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__.rpartition(".")[2])
def test_a_phase_lists_all_its_hooks_and_imports_nothing_heavy(phase):
    tree = ast.parse(inspect.getsource(phase))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert sorted(functions) == sorted(phase.__all__)
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert all(
        re.match(r"(__future__|collections|typing|pluggy|nxdt_core\.(api|kernel))", module) for module in modules
    )
