"""Every hook is documented with an example that works."""

from __future__ import annotations

import ast
import inspect
import re
from types import FunctionType

import pytest

from nxdt_core import api
from nxdt_core.kernel import hookspecs
from nxdt_core.kernel.hooks import HookManager
from nxdt_core.kernel.hookspecs import HOOKS
from nxdt_core.kernel.manager import Candidate
from nxdt_core.kernel.plugin import PluginInfo

REGISTRATION = [name for name, hook in HOOKS.items() if not inspect.signature(hook).parameters]
EXAMPLE = PluginInfo(name="example", dist="example", version="1", module="example", location="")


def example_of(name: str) -> FunctionType:
    """The body of a specification, as a function of its own."""
    specification = HOOKS[name]
    assert len(inspect.getdoc(specification)) > 30, f"{name} is not explained"
    (function,) = ast.parse(inspect.getsource(specification)).body
    assert len(function.body) > 1, f"{name} has no example"
    return api.hookimpl(FunctionType(specification.__code__, vars(hookspecs)))


class ExampleModule:
    """Holds what an example defines, as a plugin's module does."""


def collected(name: str):
    plugin = ExampleModule()
    setattr(plugin, name, example_of(name))
    manager = HookManager()
    manager.register(plugin, name=EXAMPLE.key)
    return manager, manager.implementations(name)


@pytest.mark.parametrize("name", HOOKS)
def test_the_example_implements_the_hook(name):
    assert len(collected(name)[1]) == 1


@pytest.mark.parametrize("name", REGISTRATION)
def test_the_example_of_a_registration_hook_registers(name):
    plugin = Candidate(EXAMPLE)
    manager, (implementation,) = collected(name)
    plugin.take(manager, name, implementation, {})
    declared = bool(plugin.components) + bool(plugin.kinds) + bool(plugin.offers)
    assert declared == (name != "nxdt_cli")


def test_every_kind_of_the_kernel_has_its_registration_hook():
    assert set(REGISTRATION) >= {kind.hook for kind in api.KINDS}


def test_every_function_is_a_hook_and_nothing_heavy_is_imported():
    tree = ast.parse(inspect.getsource(hookspecs))
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == [*HOOKS]
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert all(
        re.match(r"(__future__|collections|dataclasses|types|typing|pluggy|nxdt_core\.(api|kernel))", module)
        for module in modules
    )
