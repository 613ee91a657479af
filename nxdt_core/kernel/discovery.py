"""Finds plugins in the metadata of installed distributions, and files that ``plugins.local`` names.

None of their code runs until an entry module is imported, with any exception contained. Each distribution is read on
its own, guarded: the standard library's ``entry_points()`` raises for everybody where the metadata of one unrelated
distribution is malformed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, reduce
from importlib.metadata import Distribution, distributions
from operator import attrgetter
from pathlib import Path
from types import ModuleType

from nxdt_core._version import __version__
from nxdt_core.api import ENTRY_POINT_GROUP
from nxdt_core.errors.plugins import LocalPluginMissing, PluginCodeExited
from nxdt_core.kernel.metadata import (
    MalformedMetadata,
    admits,
    plugin_entries,
    read_core_metadata,
    version_of,
)
from nxdt_core.kernel.plugin import LOCAL, PluginDefect, PluginInfo, PluginPolicy, describe_failure, normalise

_MAJOR, _MINOR = __version__.split(".")[:2]
_UNBOUNDED = (
    "it requires no range of nxdt-core, so that a later nxdt-core may break it; "
    f"write 'nxdt-core>={_MAJOR}.{_MINOR},<{_MAJOR}.{int(_MINOR) + 1}'"
)

_without_plugins: dict[tuple[str, tuple[int, ...]], set[str]] = {}
"""Metadata directories without plugins in a directory of the path, by its version: installing changes it. A process
starts many kernels, and most distributions have no plugin."""

_known_plugins: dict[tuple[object, ...], list[PluginInfo]] = {}
"""Plugins of a metadata directory, by its path and the versions of its two files."""

HEAVY = ("torch", "numpy", "transformers", "pytorch_lightning", "lightning", "jax", "tensorflow", "datasets", "pandas")
"""Libraries that an entry module must leave alone; strict mode holds plugins to it."""
_brought: dict[str, list[str]] = {}
"""Heavy libraries that each entry module imported. A process imports it once, and may start more kernels than one."""


def find_plugins(policy: PluginPolicy, path: Sequence[str] | None = None) -> list[PluginInfo]:
    """Return every installed plugin, sorted by distribution and entry point, judged by its metadata alone.

    Args:
        policy: What is blocked.
        path: Directories to look in; ``sys.path`` where None.
    """
    # Within one location they come by name, the last first: file systems list in different orders, and every rank must
    # make the same choice where an upgrade left two releases behind.
    real = cache(os.path.realpath)  # hundreds of distributions share a directory
    by_location: dict[str, dict[str, Distribution]] = {}
    for number, dist in enumerate(distributions() if path is None else distributions(path=list(path))):
        # The directory <name>-<version>.dist-info or .egg-info, and its own. There is no public accessor: the standard
        # library's own de-duplication reads the same attribute, which other finders may lack.
        metadata_path = str(getattr(dist, "_path", None) or "").rstrip("/\\").replace("\\", "/")
        above, _, directory = metadata_path.rpartition("/")
        if not above or not _is_directory(dist):
            above = str(dist.locate_file(""))
        by_location.setdefault(real(above), {}).setdefault(directory or f"?{number}", dist)
    plugins: list[PluginInfo] = []
    winners: dict[str, str] = {}
    for location, dists in by_location.items():
        try:
            version = version_of(os.stat(location))
        except (OSError, ValueError):  # a finder names what it likes
            version = None
        without = _without_plugins.setdefault((location, version), set()) if version else set()
        for directory in sorted(dists, reverse=True):
            stem = normalise(directory.removesuffix(".dist-info").removesuffix(".egg-info").partition("-")[0])
            offered = [] if directory in without else _plugins_of(dists[directory], stem, location)
            if not offered:
                without.add(directory)
            key = normalise(offered[0].dist) if offered else stem
            here = f"{location}/{directory}"
            winner = winners.setdefault(key, here) if key else here
            for plugin in offered:
                if winner != here:
                    plugin = replace(plugin, state="shadowed", reason=f"hidden by {winner}")
                elif plugin.state == "ok":
                    plugin = _judge(plugin, policy)
                plugins.append(plugin)
    return sorted(plugins, key=lambda plugin: (normalise(plugin.dist), plugin.name, plugin.state == "shadowed"))


def _plugins_of(dist: Distribution, stem: str, location: str) -> list[PluginInfo]:
    """Return the plugins of one distribution, ``ok`` or ``corrupt``; none if it has no entry points of nxdt."""
    key: tuple[object, ...] = ()  # files are read again only if they have changed
    if _is_directory(dist):
        with suppress(OSError, ValueError):
            folder = str(dist._path)  # type: ignore[attr-defined]
            files = f"{folder}/entry_points.txt", f"{folder}/METADATA"
            key = location, folder, *(version_of(os.stat(file)) for file in files)
    if key in _known_plugins:
        return _known_plugins[key]
    name, reason = stem, ""
    plugins: list[PluginInfo] = []
    try:
        text = dist.read_text("entry_points.txt")
        entries = plugin_entries(text) if text and ENTRY_POINT_GROUP in text else []
        if entries:
            name = entries[0][0]
            project, version, requires = read_core_metadata(dist)
            info = PluginInfo(name="", dist=project, version=version, module="", location=location, requires=requires)
            plugins = [replace(info, name=name, module=module) for name, module in entries]
    except MalformedMetadata as error:
        reason = str(error)
    except Exception as error:  # not UTF-8, a failing disk, or any error of a third-party finder
        reason = f"entry_points.txt cannot be read: {error}" if stem.startswith("nxdt-plugin") else ""
    if reason:
        info = PluginInfo(
            name=name, dist=stem, version="", module="", location=location, state="corrupt", reason=reason
        )
        plugins = [info]
    if key and None not in key:
        _known_plugins[key] = plugins
    return plugins


def _is_directory(dist: Distribution) -> bool:
    """Return whether the finder of the standard library, or of the package that brings later versions of it and takes
    its place when a library imports it, has found a directory of metadata files."""
    kind = type(dist)
    return kind.__name__ == "PathDistribution" and kind.__module__ in ("importlib.metadata", "importlib_metadata")


def _judge(plugin: PluginInfo, policy: PluginPolicy) -> PluginInfo:
    """Apply policy and version to a plugin whose metadata is in order."""
    objection = policy.objection(name=plugin.name, dist=plugin.dist)
    if objection is not None:
        return replace(plugin, state="blocked", reason=objection)
    try:
        for line in plugin.requires:
            if not admits(line, __version__):
                reason = f"requires {line}; this is nxdt-core {__version__}"
                return replace(plugin, state="incompatible", reason=reason)
    except MalformedMetadata as error:
        return replace(plugin, state="corrupt", reason=str(error))
    # A range or an exact version excludes some later release; markers and addresses do not.
    bounded = any(re.match(r"[^;@]*(<|==|~=)", line) for line in plugin.requires)
    return plugin if bounded else replace(plugin, hints=(_UNBOUNDED,))


def find_local_plugins(policy: PluginPolicy) -> list[PluginInfo]:
    """Return the files of ``policy.local`` as plugins, sorted by name.

    Raises:
        LocalPluginMissing: a path is not a file.
    """
    plugins: list[PluginInfo] = []
    first: dict[str, Path] = {}
    for path in dict.fromkeys(map(Path.resolve, policy.local)):
        if not path.is_file():
            raise LocalPluginMissing(path=str(path))
        plugin = PluginInfo(name=path.stem, dist=LOCAL, version="", module=local_module_name(path), location=str(path))
        winner = first.setdefault(plugin.name, path)
        if winner is not path:  # `plugin:name` could not tell them apart
            plugin = replace(plugin, state="shadowed", reason=f"{winner} has the same name")
        elif objection := replace(policy, allow=None).objection(name=plugin.name, dist=LOCAL):
            plugin = replace(plugin, state="blocked", reason=objection)
        plugins.append(plugin)
    return sorted(plugins, key=attrgetter("name"))


def import_plugin(plugin: PluginInfo, *, strict: bool = False) -> tuple[object, str]:
    """Import the entry module of a plugin, or its local file, which has its components, too, and may import torch.

    Args:
        plugin: a plugin that the policy allows.
        strict: Also refuse a module that imports a library of :data:`HEAVY`.

    Returns:
        What the entry point names, and one line about heavy libraries that it imports; empty where it imports none.

    Raises:
        PluginDefect: missing, raises, calls ``sys.exit``, has no such attribute, or imports what it must not.
    """
    module = plugin.module.partition(":")[0]
    new, absent = module not in sys.modules, set(HEAVY).difference(sys.modules)
    loaded = import_reference(plugin.module, plugin.location if plugin.dist == LOCAL else "")
    if new:
        _brought[module] = [name for name in HEAVY if name in absent and name in sys.modules]
    heavy = [] if plugin.dist == LOCAL else _brought.get(module, [])
    if strict and heavy:
        raise PluginDefect(f"its entry module imports {heavy[0]}, which makes every command slow")
    return loaded, f"its entry module imports {', '.join(heavy)}, which makes every command slow" if heavy else ""


def import_reference(reference: str, file: str = "") -> object:
    """Import what ``package.module[:attribute]`` names, or a plugin file under that name.

    A file is imported once in a process, as any module; its own name for ``target`` is ``f"{__name__}:Builder"``.

    Raises:
        PluginDefect: as :func:`import_plugin`.
    """
    module_name, _, attribute = reference.partition(":")
    shown = repr(file or reference)
    try:
        module: object = _from_file(module_name, file) if file else importlib.import_module(module_name)
        return reduce(getattr, attribute.split("."), module) if attribute else module
    except ModuleNotFoundError as error:
        absent = error.name
        if absent is not None and (module_name == absent or module_name.startswith(f"{absent}.")):
            raise PluginDefect(f"module {module_name!r} does not exist") from error
        raise PluginDefect(f"importing {module_name!r} needs {absent!r}, which is not installed") from error
    except AttributeError as error:
        if not file and module_name in sys.modules and not hasattr(sys.modules[module_name], attribute.split(".")[0]):
            raise PluginDefect(f"module {module_name!r} has no attribute {attribute!r}") from error
        raise PluginDefect(f"importing {shown} {describe_failure(error)}") from error
    except (KeyboardInterrupt, PluginDefect):
        raise
    except BaseException as error:
        raise PluginDefect(f"importing {shown} {describe_failure(error)}") from error


def _from_file(name: str, path: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginDefect(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def local_module_name(path: Path) -> str:
    """Return the name under which a local plugin file is imported; the checksum keeps files of one stem apart."""
    return f"nxdt_local_{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}_{zlib.crc32(str(path).encode()):08x}"


@contextmanager
def exits_explained() -> Iterator[None]:
    """Raise an error in place of ``sys.exit`` and the panics of Rust code, which ``except Exception`` does not catch.

    Raises:
        PluginCodeExited: code of a plugin exits, or panics.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise PluginCodeExited(origin=_origin(error), reason=describe_failure(error)) from error


def note_plugin(error: BaseException) -> None:
    """Add the name of the plugin whose code raised ``error`` to its traceback."""
    origin = _origin(error)
    if origin:
        error.add_note(f"Raised in code of the plugin {origin}.")


def _origin(error: BaseException) -> str:
    """Return the name of the plugin whose code raised the error; empty where it was the core's, or is unknown."""
    packages = {plugin.module.partition(":")[0].partition(".")[0]: plugin for plugin in find_plugins(PluginPolicy())}
    trace, origin = error.__traceback__, ""
    while trace is not None:
        name, file = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_frame.f_code.co_filename
        package = name.partition(".")[0]
        if package in packages:
            origin = packages[package].label
        elif package == local_module_name(Path(file)):
            origin = f"{Path(file).stem!r} ({file})"
        elif package == "nxdt_core":
            origin = ""
        trace = trace.tb_next
    return origin
