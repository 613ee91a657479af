"""The exact set of installed plugins: a digest of each plugin's files, one of the whole set, and the file that pins it.

A wheel's digest comes from the hashes in its ``RECORD``, so that no file is read; an editable installation, a
local file and a distribution without ``RECORD`` are read. Equal installations give equal digests on any machine. A lock
file is compared before any plugin is imported, so that one that slipped in does not run.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from nxdt_core.errors.plugins import PluginLockMismatch, PluginLockUnreadable, PluginLockUnwritable
from nxdt_core.kernel.metadata import read_metadata_file, version_of
from nxdt_core.kernel.plugin import LOCAL, PluginInfo
from nxdt_core.system.regular_files import read_text, replace_text

_INSTALLER_FILES = frozenset({"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"})
"""Files in ``*.dist-info`` that the installer writes and that differ for equal wheels."""


def digest_plugin(plugin: PluginInfo) -> str:
    """Digest of the files that the plugin was installed from; of none where they were removed since. 32 hex digits."""
    try:
        if plugin.dist == LOCAL:
            return _digest_file(plugin.location)
        record = _wheel_record(plugin)
        return digest_lines(record) if record else _digest_files(plugin.module)
    except (FileNotFoundError, NotADirectoryError):
        return digest_lines(())


def editable_source(dist: Distribution) -> Path | None:
    """Return the directory of an installation with ``pip install -e``; None of other installations."""
    try:
        origin = json.loads(read_metadata_file(dist, "direct_url.json") or "{}")
    except ValueError:
        return None
    if not isinstance(origin, dict) or not (origin.get("dir_info") or {}).get("editable"):
        return None
    return Path(unquote(urlsplit(str(origin.get("url", ""))).path))


def digest_lines(lines: Iterable[str]) -> str:
    """Return the digest of lines of text. 32 hex digits."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _wheel_record(plugin: PluginInfo) -> list[str]:
    """Path and hash of each file of an installed wheel, sorted; empty where the files have to be read."""
    dist = next(iter(distributions(name=plugin.dist, path=[plugin.location])), None)
    if dist is None or editable_source(dist) is not None:
        return []
    record = read_metadata_file(dist, "RECORD") or ""
    rows = [row for row in csv.reader(record.splitlines()) if len(row) >= 2]
    return sorted(f"{path} {digest}" for path, digest, *_ in rows if digest and _is_content(PurePosixPath(path)))


def _is_content(path: PurePosixPath) -> bool:
    """Return whether a file of ``RECORD`` has content of the wheel; scripts, outside, name the interpreter's path."""
    if path.is_absolute() or ".." in path.parts or path.suffix == ".pyc":
        return False
    return not (path.parts[0].endswith(".dist-info") and path.name in _INSTALLER_FILES)


def _digest_files(module: str) -> str:
    """Digest of the names and contents of the top-level package or module of an entry point."""
    spec = importlib.util.find_spec(module.partition(":")[0].partition(".")[0])
    if spec is None:
        return digest_lines(())
    if not spec.submodule_search_locations:
        return _digest_file(spec.origin or "")
    digest = hashlib.sha256()
    for root in spec.submodule_search_locations:
        for parts, path in sorted(_files(root, ())):
            digest.update(f"{'/'.join(parts)}\0{_digest_file(path)}\n".encode())
    return digest.hexdigest()[:32]


def _digest_file(path: str) -> str:
    """Digest of a file's content, which is read again only if it has changed."""
    version = version_of(os.stat(path))
    return _read_digest(path, version) if version is not None else _read_digest.__wrapped__(path, version)


@lru_cache(maxsize=65536)
def _read_digest(path: str, version: tuple[int, ...] | None) -> str:
    """Return the digest of a file in one of its versions."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.sha256(file.read()).hexdigest()[:32]


def _files(folder: str, below: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Parts of the names, and paths, of all files under ``folder``, without byte code and hidden files."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name == "__pycache__":
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, (*below, entry.name))
            elif entry.is_file():
                yield (*below, entry.name), entry.path


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
        content = json.loads(read_text(path, follow=True))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, known is {_FORMAT}")
        return {(row["dist"], row["plugin"]): _facts(row) for row in content["plugins"]}
    except (OSError, ValueError, RecursionError) as error:
        raise PluginLockUnreadable(path=str(path), reason=str(error)) from error
    except (KeyError, TypeError) as error:
        raise PluginLockUnreadable(path=str(path), reason=f"it is not a lock file ({error!r})") from error


def _facts(row: dict[str, Any]) -> dict[str, str]:
    return {field: str(row[field]) for field in _FIELDS}
