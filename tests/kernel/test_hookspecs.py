"""Every hook is documented with an example that works, and has its method on the facade."""

from __future__ import annotations

import ast
import inspect
import re
from textwrap import dedent

import pytest

from nxdt_core import api
from nxdt_core.kernel.components.declaration import declare
from nxdt_core.kernel.hooks.checks import collect_hooks
from nxdt_core.kernel.hooks.facade import Hooks
from nxdt_core.kernel.hooks.table import own_hooks, specifications
from nxdt_core.kernel.hookspecs import PHASES, registration
from nxdt_core.kernel.plugin import PluginInfo

HOOKS = [pytest.param(phase, name, id=name) for phase in PHASES for name in phase.__all__]
OF_KINDS = {kind.hook for kind in api.KINDS}
"""The facade calls all of these by one method."""


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
    return collect_hooks(plugin, specifications())


@pytest.mark.parametrize(("phase", "name"), HOOKS)
def test_the_example_implements_the_hook(phase, name):
    assert vars(collected(phase, name)).keys() == {name}


@pytest.mark.parametrize("name", registration.__all__)
def test_the_example_of_a_registration_hook_registers(name):
    plugin = PluginInfo(name="example", dist="example", version="1", module="example", location="")
    declaration = declare(plugin, Hooks(own_hooks(plugin, collected(registration, name))))
    declared = bool(declaration.components) + bool(declaration.kinds) + bool(declaration.added)
    assert declared == (name != "nxdt_cli")


@pytest.mark.parametrize(("phase", "name"), [hook for hook in HOOKS if hook.id not in OF_KINDS])
def test_the_facade_has_the_hook_with_the_same_arguments(phase, name):
    expected = list(inspect.signature(getattr(phase, name)).parameters)
    assert list(inspect.signature(getattr(Hooks, name)).parameters) == ["self", *expected]
    assert inspect.getdoc(getattr(Hooks, name))


def test_the_facade_has_no_hook_that_is_not_specified():
    assert {name for name in vars(Hooks) if name.startswith("nxdt_")} == {
        name for p in PHASES for name in p.__all__
    } - OF_KINDS


def test_every_kind_of_the_kernel_has_its_registration_hook():
    assert set(registration.__all__) >= OF_KINDS


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__.rpartition(".")[2])
def test_a_phase_lists_all_its_hooks_and_imports_nothing_heavy(phase):
    tree = ast.parse(inspect.getsource(phase))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert sorted(functions) == sorted(phase.__all__)
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert all(re.match(r"(__future__|collections|typing|nxdt_core\.(api|kernel))", module) for module in modules)
