"""What is wrong with installed plugins, for ``nxdt plugins doctor``; among it editable installations whose metadata are
of an older ``pyproject.toml``: pip writes them at installation."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from typing import Any

from nxdt_core.kernel.fingerprint import editable_source
from nxdt_core.kernel.plugin import PluginInfo, advise, diagnose

__all__ = ["complaints", "stale_metadata"]

_GROUP = "nxdt.plugins"


def complaints(plugins: Iterable[PluginInfo]) -> Iterator[str]:
    """Yield a line for each thing that is wrong with a plugin; one that is blocked is as its user wants it."""
    for plugin in plugins:
        if plugin.state not in ("ok", "blocked"):
            yield f"plugin {diagnose(plugin)} ({advise(plugin)})"
        for line in (plugin.note, *plugin.hints, stale_metadata(plugin)):
            if line:
                yield f"plugin {plugin.label}: {line}"


def stale_metadata(plugin: PluginInfo) -> str:
    """Return how the metadata of an editable installation differ from its sources, as a sentence without an end; empty
    where they agree, and of other installations.

    Compared are the entry points of plugins, the version and the requirements, where ``pyproject.toml`` has them.
    """
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
