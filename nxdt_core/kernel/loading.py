"""Imports a plugin's entry module, with any exception contained."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import zlib
from functools import reduce
from pathlib import Path
from types import ModuleType

from nxdt_core.kernel.plugin import GUARDED, LOCAL, PluginDefect, PluginInfo, describe_failure

__all__ = ["HEAVY", "import_local", "import_plugin", "import_reference", "local_module_name"]

HEAVY = ("torch", "numpy", "transformers", "pytorch_lightning", "lightning", "jax", "tensorflow", "datasets", "pandas")
"""Libraries that an entry module must leave alone; strict mode holds plugins to it."""
_brought: dict[str, list[str]] = {}
"""Those that each entry module imported. It is imported once in a process, kernels may be started more often."""


def import_plugin(plugin: PluginInfo, *, strict: bool = False) -> tuple[object, str]:
    """Import the entry module of a plugin, or its local file.

    Args:
        plugin: that may be imported.
        strict: Also refuse a module that imports a library of :data:`HEAVY`.

    Returns:
        What the entry point names, and one line about heavy libraries that it imports; empty where it imports none.

    Raises:
        PluginDefect: missing, raises, calls ``sys.exit``, has no such attribute, or imports what it must not.
    """
    module = plugin.module.partition(":")[0]
    new, absent = module not in sys.modules, [name for name in HEAVY if name not in sys.modules]
    loaded = import_local(plugin) if plugin.dist == LOCAL else import_reference(plugin.module)
    if new:
        _brought[module] = [name for name in absent if name in sys.modules]
    heavy = _brought.get(module, [])
    if strict and heavy:
        raise PluginDefect(f"its entry module imports {heavy[0]}, which makes every command slow")
    return loaded, f"its entry module imports {', '.join(heavy)}, which makes every command slow" if heavy else ""


def import_reference(reference: str) -> object:
    """Import what ``package.module[:attribute]`` names.

    Raises:
        PluginDefect: as :func:`import_plugin`.
    """
    module_name, _, attribute = reference.partition(":")
    try:
        module: object = importlib.import_module(module_name)
        return reduce(getattr, attribute.split("."), module) if attribute else module
    except ModuleNotFoundError as error:
        raise PluginDefect(_missing(module_name, error.name)) from error
    except AttributeError as error:
        if module_name in sys.modules and not hasattr(sys.modules[module_name], attribute.split(".")[0]):
            raise PluginDefect(f"module {module_name!r} has no attribute {attribute!r}") from error
        raise PluginDefect(f"importing {reference!r} {describe_failure(error)}") from error
    except GUARDED as error:
        raise PluginDefect(f"importing {reference!r} {describe_failure(error)}") from error


def _missing(module: str, absent: str | None) -> str:
    if absent is not None and (module == absent or module.startswith(f"{absent}.")):
        return f"module {module!r} does not exist"
    return f"importing {module!r} needs {absent!r}, which is not installed"


def local_module_name(path: Path) -> str:
    """Return the name under which a local plugin file is imported; the checksum keeps files of one stem apart."""
    return f"nxdt_local_{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}_{zlib.crc32(str(path).encode()):08x}"


def import_local(plugin: PluginInfo) -> ModuleType:
    """Import a plugin file by its path; its own name for ``target`` is ``f"{__name__}:Builder"``.

    It is imported once in a process, as any module.

    Raises:
        PluginDefect: it raises or calls ``sys.exit``.
    """
    name, path = plugin.module, plugin.location
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginDefect(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        del sys.modules[name]
        raise PluginDefect(_missing(name, error.name)) from error
    except GUARDED as error:
        del sys.modules[name]
        raise PluginDefect(f"importing {path!r} {describe_failure(error)}") from error
    return module
