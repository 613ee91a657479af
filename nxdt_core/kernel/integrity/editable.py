"""Finds editable installations whose metadata are of an older ``pyproject.toml``: pip writes them at installation."""

from __future__ import annotations

import json
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from nxdt_core.kernel.discovery.metadata import read_metadata_file
from nxdt_core.kernel.plugin import PluginInfo

__all__ = ["editable_source", "stale_metadata"]

_GROUP = "nxdt.plugins"


def stale_metadata(plugin: PluginInfo) -> str:
    """Return how the metadata of an editable installation differ from its sources, as a sentence without an end; empty
    where they agree, and of other installations.

    Compared are the entry points of plugins, the version and the requirements, where ``pyproject.toml`` has them.
    """
    import tomllib  # only `nxdt plugins doctor` needs it, and every command imports this module

    dist = next(iter(distributions(name=plugin.dist, path=[plugin.location])), None)
    source = None if dist is None else editable_source(dist)
    if dist is None or source is None:
        return ""
    again = f"run 'pip install -e {source}' again"
    if not source.is_dir():
        return f"it is installed from {source}, which does not exist"
    try:
        project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError):
        return ""
    different = [
        name for name, installed, written in _pairs(dist, project) if written is not None and installed != written
    ]
    if not different:
        return ""
    return (
        f"its installed metadata are older than {source / 'pyproject.toml'}: other {' and '.join(different)}; {again}"
    )


def editable_source(dist: Distribution) -> Path | None:
    """Return the directory of an installation with ``pip install -e``; None of other installations."""
    try:
        origin = json.loads(read_metadata_file(dist, "direct_url.json") or "{}")
    except ValueError:
        return None
    if not isinstance(origin, dict) or not (origin.get("dir_info") or {}).get("editable"):
        return None
    return Path(unquote(urlsplit(str(origin.get("url", ""))).path))


def _pairs(dist: Distribution, project: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name, installed value, and that of the project; None where the project does not say it."""
    entries = {each.name: each.value for each in dist.entry_points if each.group == _GROUP}
    written = project.get("entry-points", {}).get(_GROUP, {})
    ours = None if "dependencies" not in project else {_compact(line) for line in project["dependencies"]}
    installed = {_compact(line) for line in dist.requires or () if "extra ==" not in line}
    return [
        ("entry points", entries, written),
        ("version", dist.version, project.get("version")),
        ("requirements", installed, ours),
    ]


def _compact(requirement: str) -> str:
    """A requirement in one spelling, as far as builders change it: order of the bounds, spaces and quotes."""
    bounds, mark, marker = requirement.replace("'", '"').partition(";")
    name = bounds.replace(" ", "").lower().replace("_", "-")
    start = next((place for place, letter in enumerate(name) if letter in "<>=!~"), len(name))
    parts = sorted(name[start:].strip("()").split(","))
    return name[:start].rstrip("(") + ",".join(parts) + mark + marker.replace(" ", "")
