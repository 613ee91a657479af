"""Tests that every plugin of any kind must pass; its author subclasses it once.

Example, the whole test file of a plugin::

    from nxdt_testing.plugin_contract import PluginContract

    class TestMyPlugin(PluginContract):
        plugin = "mine"  # the name of its entry point; the distribution is installed

The components have separate contracts.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from nxdt_core.config import check
from nxdt_core.config.read import fill, read_part
from nxdt_core.config.schema import usable_class
from nxdt_core.config.section import REQUIRED, Key, keys_of
from nxdt_core.config.show import class_doc, field_docs
from nxdt_core.config.sources import list_recipes
from nxdt_core.config.tree import DEFAULT, Tree, parse_yaml
from nxdt_core.errors.configuration import BadComponentConfig
from nxdt_core.kernel import Kernel, PluginInfo
from nxdt_core.kernel.registry import RegisteredComponent
from nxdt_testing.contract import no_error
from nxdt_testing.processes.side_effects import in_new_process
from nxdt_testing.unread_keys import unread_keys_of_package

__all__ = ["PluginContract"]

_PROBE = """
import json
from nxdt_core.kernel import Kernel

def plain(record):
    values = {name: getattr(record, name) for name in type(record).__dataclass_fields__}
    return {name: sorted(value) if isinstance(value, frozenset) else repr(value) for name, value in values.items()}

kernel = Kernel.start()
registry = kernel.registry
print(json.dumps({
    "plugins": [
        {"name": p.name, "state": p.state, "reason": p.reason, "note": p.note, "hints": list(p.hints)}
        for p in kernel.plugins
    ],
    "components": [[c.plugin, k.name, plain(c.record)] for k in registry.kinds() for c in registry.all(k.name)],
    "fingerprint": kernel.fingerprint(),
}))
"""
_IMPORT = """
import sys, time
from importlib import import_module
import nxdt_core.api
begun = time.process_time()
import_module(sys.argv[1])
print(time.process_time() - begun)
"""
_LIGHT_S = 0.015
"""CPU seconds that an entry module may take: every command of every user pays them."""
_ATTEMPTS = 3
"""Timed imports; the quickest counts, since the first may compile bytecode and another process may use the caches."""


class PluginContract:
    """The tests of a plugin: subclass it and set :attr:`plugin`."""

    plugin: ClassVar[str]
    """Name of its entry point."""

    @pytest.fixture
    def info(self) -> PluginInfo:
        """Return the plugin as this process finds it."""
        plugins = [plugin for plugin in _started(*sys.path).plugins if plugin.name == self.plugin]
        assert plugins, f"no plugin is called {self.plugin!r}; install its distribution"
        return plugins[0]

    @pytest.fixture
    def components(self) -> Sequence[RegisteredComponent]:
        """Return what it offers."""
        registry = _started(*sys.path).registry
        every = [component for kind in registry.kinds() for component in registry.all(kind.name)]
        return [component for component in every if component.plugin == self.plugin]

    @pytest.fixture
    def sections(self, components: Sequence[RegisteredComponent]) -> Sequence[tuple[RegisteredComponent, type]]:
        """Return the components that have a section, each with its class."""
        return [(component, cls) for component in components if (cls := component.load_config()) is not None]

    @pytest.fixture
    def found(self, info: PluginInfo) -> dict[str, Any]:
        """Return the plugin as a new process finds it."""
        plugins: list[dict[str, Any]] = _probe("0", *sys.path)["plugins"]
        return next(plugin for plugin in plugins if plugin["name"] == info.name)

    def test_it_is_usable(self, found: dict[str, Any]) -> None:
        """A new process finds the plugin compatible, imports it and registers its components."""
        assert found["state"] == "ok", f"the plugin is {found['state']}: {found['reason']}"

    def test_its_entry_module_changes_nothing_else(self, found: dict[str, Any]) -> None:
        """No heavy library, no function of torch, no thread, no environment; and it has a hook and a range."""
        notes = [line for line in (found["note"], *found["hints"]) if line]
        assert not notes, f"nxdt reports about the plugin: {'; '.join(notes)}"

    def test_its_entry_module_is_light(self, info: PluginInfo) -> None:
        """Importing it takes at most 15 ms of CPU time after ``nxdt_core.api``: every command imports it."""
        module = info.module.partition(":")[0]
        fastest = math.inf  # CPU seconds of a new process
        for _ in range(_ATTEMPTS):
            try:
                fastest = min(fastest, float(in_new_process(_IMPORT, module)))
            except RuntimeError:
                pytest.skip(f"{module} cannot be imported")
            if fastest <= _LIGHT_S:
                break
        assert fastest <= _LIGHT_S, (
            f"importing {module} takes {1000 * fastest:.0f} ms of CPU time; at most {1000 * _LIGHT_S:.0f} are allowed: "
            "move imports and computations into the modules that targets name"
        )

    def test_every_process_finds_the_same(self) -> None:
        """Ranks compare records and fingerprints; a set has another order in each process."""
        one, other = _probe("0", *sys.path), _probe("1", *sys.path)
        mine = [[each for each in found["components"] if each[0] == self.plugin] for found in (one, other)]
        assert mine[0] == mine[1], "two processes register different records; use no set order, clock or random number"
        assert one["fingerprint"] == other["fingerprint"], "two processes compute different fingerprints"

    def test_every_target_can_be_imported(self, components: Sequence[RegisteredComponent]) -> None:
        """``package.module:attribute`` names something that can be called; of a device type, its profile."""
        for component in components:
            target = component.load_target()
            called = callable(target) or component.kind == "device"  # whose target is a profile
            name = f"{component.kind} {component.record.name!r}"
            assert called, f"the target {component.record.target!r} of the {name} cannot be called"

    def test_every_section_is_documented(self, sections: Sequence[tuple[RegisteredComponent, type]]) -> None:
        """The section and each of its keys, where ``nxdt config show`` and the reference take their text from."""
        for _, cls in sections:
            assert class_doc(cls), f"{cls.__name__} has no docstring"
            documented = field_docs(cls)
            missing = [name for name in keys_of(cls) if not documented.get(name)]
            assert not missing, f"these keys of {cls.__name__} have no docstring below them: {', '.join(missing)}"

    def test_every_key_is_read(self, sections: Sequence[tuple[RegisteredComponent, type]]) -> None:
        """Code of the package or of the core reads each key, so that none is accepted and then ignored.

        A key that is deliberately ignored says so: ``Annotated[bool, NoEffect("reason")]``. A package that takes all
        keys at once, for example with ``model_dump``, is not checked.
        """
        for _, cls in sections:
            unread = unread_keys_of_package(cls)
            assert not unread, (
                f"no code reads these keys of {cls.__name__}: {', '.join(unread)}; use them, remove them, or annotate "
                "them with NoEffect and a reason"
            )

    def test_every_section_comes_back_from_a_file(self, sections: Sequence[tuple[RegisteredComponent, type]]) -> None:
        """Its defaults, written as YAML and read again, are the same; one with required keys has no defaults."""
        for component, cls in sections:
            if any(key.default is REQUIRED for key in _keys(component, cls).values()):
                continue
            tree = Tree({}, {(): DEFAULT})
            fill(tree, cls)
            first, problems = read_part(cls, tree, "")
            name = cls.__name__
            assert not problems, f"the defaults of {name} do not fit its keys: {problems[0]}"
            with no_error(f"the defaults of {name} cannot be written as YAML:"):
                text = yaml.safe_dump(tree.data)
            read, unread = parse_yaml(text, name)
            again, problems = read_part(cls, read, "")
            wrong = [*unread, *problems]
            assert not wrong, f"the defaults of {name} are not read back from YAML: {wrong[0]}"
            assert again == first, f"{name} is {first} by its defaults, and {again} when they are read from a file"

    def test_every_section_has_a_json_schema(self, sections: Sequence[tuple[RegisteredComponent, type]]) -> None:
        """Editors complete and check keys by it; it leaves a section out that has a type which YAML does not have."""
        for component, cls in sections:
            for name, key in _keys(component, cls).items():
                if key.section is not None:
                    continue
                with no_error(f"the JSON Schema of {cls.__name__}.{name} has a value that JSON has not:"):
                    json.dumps(key.json_schema())

    def test_every_record_has_a_summary(self, components: Sequence[RegisteredComponent]) -> None:
        """``nxdt plugins show`` prints it."""
        missing = [
            f"{component.kind} {component.record.name!r}" for component in components if not component.record.summary
        ]
        assert not missing, f"these records have no summary: {', '.join(missing)}"

    def test_its_recipes_are_right(self) -> None:
        """``nxdt config check`` accepts each, as far as its files are here."""
        for recipe in list_recipes(_started(*sys.path)):
            if recipe.plugin == self.plugin:
                problems = check(f"recipe:{recipe.plugin}:{recipe.name}")
                assert not problems, f"the recipe {recipe.name!r} is wrong: {problems[0]}"
                assert recipe.summary, f"the recipe {recipe.name!r} does not begin with a comment that says what it is"

    def test_it_is_typed(self, info: PluginInfo) -> None:
        """A package has the file ``py.typed``, so that type checkers read its annotations."""
        package = info.module.partition(":")[0].partition(".")[0]
        spec = find_spec(package)
        for place in (spec.submodule_search_locations if spec is not None else None) or ():
            assert (Path(place) / "py.typed").is_file(), f"the package {package!r} has no file py.typed"

    def test_its_readme_says_how_to_install_it(self, info: PluginInfo) -> None:
        """Check that the README has a line ``pip install NAME``."""
        installed = distribution(info.dist)  # not its parsed metadata: libraries put parsers there that drop the README
        text = installed.read_text("METADATA") or installed.read_text("PKG-INFO") or ""
        explained = any("pip install" in line and info.dist in line for line in text.splitlines())
        assert explained, f"the README has no line 'pip install {info.dist}'"


@cache
def _started(*path: str) -> Kernel:
    """The plugins of ``sys.path``: the tests of several share what this process finds."""
    del path
    return Kernel.start()


def _keys(component: RegisteredComponent, cls: type) -> dict[str, Key]:
    """The keys of a section, which must have types that YAML values can be read into."""
    try:
        usable_class(component)
    except BadComponentConfig as error:
        pytest.fail(f"{cls.__name__} cannot be a section: {error}")
    return keys_of(cls)


@cache
def _probe(seed: str, *path: str) -> dict[str, Any]:
    """Return the report of a new process under ``PYTHONHASHSEED=seed``; the tests of several plugins share it."""
    del path
    return dict(json.loads(in_new_process(_PROBE, PYTHONHASHSEED=seed)))
