"""Pins the set of plugins: a lock file names each plugin whose code runs, with the digest of its files.

The file is compared before any plugin is imported, so that one that slipped in does not run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from nxdt_core.errors.plugins import PluginLockMismatch, PluginLockUnreadable, PluginLockUnwritable
from nxdt_core.kernel.fingerprint import digest_plugin
from nxdt_core.kernel.plugin import PluginInfo
from nxdt_core.regular_files import replace_text

__all__ = ["compare_with_lock", "write_lock"]

_FORMAT: Final = 1
_FIELDS: Final = ("version", "digest")

Entries = dict[tuple[str, str], dict[str, str]]
"""Version and digest by distribution and entry point."""


def write_lock(plugins: Iterable[PluginInfo], path: Path) -> None:
    """Write the lock file of a started kernel's plugins, replacing an older one atomically.

    Raises:
        PluginLockUnwritable: it cannot be written.
    """
    rows = [{"dist": dist, "plugin": name, **facts} for (dist, name), facts in sorted(_entries(plugins).items())]
    text = json.dumps({"format": _FORMAT, "plugins": rows}, indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise PluginLockUnwritable(path=str(path), reason=error.strerror or str(error)) from error


def compare_with_lock(plugins: Iterable[PluginInfo], path: Path) -> None:
    """Compare plugins found with a lock file; their code need not have run.

    Raises:
        PluginLockMismatch: another set of plugins, versions or files.
        PluginLockUnreadable: the file does not exist or is not a lock file.
    """
    locked, found = _read(path), _entries(plugins)
    differences = [
        _difference(key, locked.get(key), found.get(key))
        for key in sorted(locked.keys() | found.keys())
        if locked.get(key) != found.get(key)
    ]
    if differences:
        raise PluginLockMismatch(path=str(path), differences=tuple(differences))


def _entries(plugins: Iterable[PluginInfo]) -> Entries:
    """Facts of the plugins whose code runs: a broken one's does as well."""
    return {
        (plugin.dist, plugin.name): {"version": plugin.version, "digest": digest_plugin(plugin)}
        for plugin in plugins
        if plugin.state in ("ok", "broken")
    }


def _difference(key: tuple[str, str], locked: dict[str, str] | None, found: dict[str, str] | None) -> str:
    name = f"{key[1]!r} of {key[0]}"
    if found is None:
        return f"{name} is missing"
    if locked is None:
        return f"{name} is not in the file"
    if locked["version"] != found["version"]:
        return f"{name} has version {found['version']}, locked is {locked['version']}"
    return f"{name} has other files than were locked"


def _read(path: Path) -> Entries:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, known is {_FORMAT}")
        return {(row["dist"], row["plugin"]): _facts(row) for row in content["plugins"]}
    except (OSError, ValueError, RecursionError) as error:
        raise PluginLockUnreadable(path=str(path), reason=str(error)) from error
    except (KeyError, TypeError) as error:
        raise PluginLockUnreadable(path=str(path), reason=f"it is not a lock file ({error!r})") from error


def _facts(row: dict[str, Any]) -> dict[str, str]:
    return {field: str(row[field]) for field in _FIELDS}
