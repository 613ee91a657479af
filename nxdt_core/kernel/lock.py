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
from typing import Final
from urllib.parse import unquote, urlsplit

from nxdt_core.errors.plugins import PluginLockMismatch, PluginLockUnreadable, PluginLockUnwritable
from nxdt_core.kernel.metadata import version_of
from nxdt_core.kernel.plugin import LOCAL, PluginInfo
from nxdt_core.system.regular_files import read_text, replace_text

_INSTALLER_FILES = frozenset({"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"})
"""Files in ``*.dist-info`` that the installer writes and that differ for equal wheels."""

_FORMAT: Final = 1


Entries = dict[tuple[str, str], dict[str, str]]
"""Version and digest by distribution and entry point."""


def digest_plugin(plugin: PluginInfo) -> str:
    """Digest of the files that the plugin was installed from; of none where they were removed since. 32 hex digits."""
    try:
        if plugin.dist == LOCAL:
            return _digest_file(plugin.location)
        # The record of an installed wheel, without scripts, which are outside and name the interpreter's path.
        dist = next(iter(distributions(name=plugin.dist, path=[plugin.location])), None)
        if dist is not None and editable_source(dist) is None:
            rows = csv.reader((dist.read_text("RECORD") or "").splitlines())
            files = [(PurePosixPath(row[0]), row[1]) for row in rows if len(row) >= 2 and row[1]]
            lines = [
                f"{path} {hashed}"
                for path, hashed in files
                if not (path.is_absolute() or ".." in path.parts or path.suffix == ".pyc")
                and not (path.parts[0].endswith(".dist-info") and path.name in _INSTALLER_FILES)
            ]
            if lines:
                return digest_lines(sorted(lines))
        # Or names and contents of the top-level package or module of the entry point.
        spec = importlib.util.find_spec(plugin.module.partition(":")[0].partition(".")[0])
        if spec is None:
            return digest_lines(())
        if not spec.submodule_search_locations:
            return _digest_file(spec.origin or "")
        digest = hashlib.sha256()
        for root in spec.submodule_search_locations:
            for parts, file in sorted(_files(root, ())):
                digest.update(f"{'/'.join(parts)}\0{_digest_file(file)}\n".encode())
        return digest.hexdigest()[:32]
    except (FileNotFoundError, NotADirectoryError):
        return digest_lines(())


def editable_source(dist: Distribution) -> Path | None:
    """Return the directory of an installation with ``pip install -e``; None of other installations."""
    try:
        origin = json.loads(dist.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    if not isinstance(origin, dict) or not (origin.get("dir_info") or {}).get("editable"):
        return None
    return Path(unquote(urlsplit(str(origin.get("url", ""))).path))


def digest_lines(lines: Iterable[str]) -> str:
    """Return the digest of lines of text. 32 hex digits."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


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
    """Compare plugins that were found with a lock file; their code need not have run.

    Raises:
        PluginLockMismatch: another set of plugins, versions or files.
        PluginLockUnreadable: the file does not exist or is not a lock file.
    """
    locked, installed = _read(path), _entries(plugins)
    differences = []
    for dist, plugin in sorted(locked.keys() | installed.keys()):
        name, pinned, here = f"{plugin!r} of {dist}", locked.get((dist, plugin)), installed.get((dist, plugin))
        if here is None:
            differences.append(f"{name} is missing")
        elif pinned is None:
            differences.append(f"{name} is not in the file")
        elif pinned["version"] != here["version"]:
            differences.append(f"{name} has version {here['version']}, locked is {pinned['version']}")
        elif pinned != here:
            differences.append(f"{name} has other files than were locked")
    if differences:
        raise PluginLockMismatch(path=str(path), differences=tuple(differences))


def _entries(plugins: Iterable[PluginInfo]) -> Entries:
    """Facts of the plugins whose code runs: a broken one's does as well."""
    return {
        (plugin.dist, plugin.name): {"version": plugin.version, "digest": digest_plugin(plugin)}
        for plugin in plugins
        if plugin.state in ("ok", "broken")
    }


def _read(path: Path) -> Entries:
    try:
        content = json.loads(read_text(path, follow=True))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, known is {_FORMAT}")
        return {
            (row["dist"], row["plugin"]): {field: str(row[field]) for field in ("version", "digest")}
            for row in content["plugins"]
        }
    except (OSError, ValueError, RecursionError) as error:
        raise PluginLockUnreadable(path=str(path), reason=str(error)) from error
    except (KeyError, TypeError) as error:
        raise PluginLockUnreadable(path=str(path), reason=f"it is not a lock file ({error!r})") from error
