"""A directory on ``sys.path`` that tests fill with distributions, and kernels started on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from nxdt_core.kernel import Kernel, PluginInfo, PluginPolicy
from tests.distributions import write_distribution

OPTIMIZER = """
    from nxdt_core.api import Component, hookimpl

    @hookimpl
    def nxdt_optimizers():
        return [Component(name={name!r}, target="{module}_impl:build", summary="a test's")]
"""


class Site:
    """One directory of ``sys.path``."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._monkeypatch = monkeypatch

    def add(self, dist: str, source: str = "", *, module: str | None = None, **options) -> str:
        """Write a distribution ``dist`` whose one plugin has the source text; returns the module's name."""
        module = module or dist.replace("-", "_")
        options.setdefault("plugins", {dist.removeprefix("nxdt-plugin-"): module})
        files = options.pop("files", {})
        self._monkeypatch.delitem(sys.modules, module, raising=False)  # one of ours by that name, from another test
        write_distribution(self.path, dist, files={f"{module}.py": dedent(source), **files}, **options)
        return module

    def add_optimizer(self, dist: str, name: str, **options) -> None:
        """Write a sound plugin that offers the optimizer ``name``."""
        module = dist.replace("-", "_")
        self.add(
            dist,
            dedent(OPTIMIZER).format(name=name, module=module),
            files={f"{module}_impl.py": "def build(groups, config): return 'built'\n"},
            **options,
        )

    def start(self, *, strict: bool = False, **policy) -> Kernel:
        """Start a kernel that sees this directory's distributions alone."""
        return Kernel.start(PluginPolicy(**policy), strict=strict, path=[str(self.path)])


@pytest.fixture
def new_site(tmp_path, monkeypatch) -> Iterator[Callable[[str], Site]]:
    """Make directories of ``sys.path``; the first one made stands last. Their modules are forgotten afterwards."""

    def make(name: str) -> Site:
        path = tmp_path / name
        path.mkdir()
        monkeypatch.syspath_prepend(path)
        return Site(path, monkeypatch)

    before = set(sys.modules)
    yield make
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def site(new_site) -> Site:
    """One empty directory of ``sys.path``."""
    return new_site("site")


@pytest.fixture
def plugin_named() -> Callable[[Kernel, str], PluginInfo]:
    """Find a plugin of a kernel by its name; there must be one."""

    def find(kernel: Kernel, name: str) -> PluginInfo:
        (plugin,) = [plugin for plugin in kernel.plugins if plugin.name == name]
        return plugin

    return find


@pytest.fixture
def contributed():
    """Qualified names of the optimizers that are not built in."""
    return lambda kernel: [
        found.qualified_name for found in kernel.registry.all("optimizer") if found.plugin != "builtin"
    ]
