"""Paths as users write them: ``~`` for the home directory, and ``package://`` for files of an import package."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

__all__ = ["PACKAGE_SCHEME", "PackageNotFound", "expand_home", "package_directory", "resolve_path", "scheme_of"]

PACKAGE_SCHEME = "package://"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class PackageNotFound(LookupError):
    """The package of a ``package://`` path is not installed, or the path leaves it."""


def scheme_of(uri: str) -> str:
    """Return the scheme of an address in lower case; a plain path has ``file``."""
    match = _SCHEME.match(uri)
    return match[1].lower() if match else "file"


def expand_home(path: str | Path) -> Path:
    """Return a path with ``~`` replaced by the home directory; as it is where no user of that name exists."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def resolve_path(value: str | Path, relative_to: Path | None = None) -> Path:
    """Return the absolute path that ``value`` means; whether it exists is not looked at.

    Args:
        value: A path, ``~/…``, or ``package://<import package>/<path inside it>``.
        relative_to: Directory that a relative path starts at; the working directory by default.

    Raises:
        PackageNotFound: no package of that name is installed, or the path leaves the package.
    """
    text = str(value)
    if text.startswith(PACKAGE_SCHEME):
        package, _, inside = text.removeprefix(PACKAGE_SCHEME).partition("/")
        # The path may come from a checkpoint. To find a package inside another one, Python would import the outer one.
        directory = None if "." in package else package_directory(package)
        if directory is None:
            raise PackageNotFound(f"no package {package!r} is installed")
        if inside.startswith("/") or ".." in inside.split("/"):
            raise PackageNotFound(f"the path leaves the package {package!r}")
        return directory / inside
    return (relative_to or Path.cwd()).absolute() / expand_home(text)


def package_directory(package: str) -> Path | None:
    """Return the directory of an import package; None where it is a single module, or not there."""
    try:
        spec = find_spec(package) if package else None
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) if locations else None
