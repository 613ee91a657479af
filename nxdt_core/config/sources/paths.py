"""Paths in configurations: ``package://nxdt_plugin_text/data/x.txt``, and what relative ones are relative to."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ["PACKAGE_SCHEME", "PackageNotFound", "expand_home", "resolve_path"]

PACKAGE_SCHEME = "package://"


class PackageNotFound(LookupError):
    """The package of a ``package://`` path is not installed."""


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
        PackageNotFound: no package of that name is installed.
    """
    text = str(value)
    if text.startswith(PACKAGE_SCHEME):
        package, _, inside = text.removeprefix(PACKAGE_SCHEME).partition("/")
        return _package_directory(package) / inside
    return (relative_to or Path.cwd()).absolute() / expand_home(text)


def _package_directory(package: str) -> Path:
    try:
        # The path may come from a checkpoint. To find a package inside another one, Python would import the outer one.
        spec = None if "." in package else find_spec(package)
    except (ImportError, ValueError):
        spec = None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not locations:
        raise PackageNotFound(f"no package {package!r} is installed")
    return Path(locations[0])
