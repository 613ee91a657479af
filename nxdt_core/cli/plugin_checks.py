"""Problems of installed plugins (``nxdt plugins doctor``), and which have newer versions (``outdated``).

Among the first are editable installations whose metadata are older than their ``pyproject.toml``: pip writes
metadata at installation.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.terminal import print_table
from nxdt_core.cli.verb import Verb, as_json, print_json, say

if TYPE_CHECKING:
    from importlib.metadata import Distribution

    from nxdt_core.kernel.plugin import PluginInfo


_TIMEOUT_S = 60
_AT_ONCE = 4


@click.command(
    "outdated",
    cls=Verb,
    short_help="Compare installed plugins with pip's index.",
    examples=("nxdt plugins outdated", "nxdt plugins outdated nxdt-plugin-llama --json"),
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@as_json
@click.pass_context
def outdated(ctx: click.Context, names: tuple[str, ...], json_output: bool) -> None:
    """Ask the package index that pip is configured for whether newer versions of the core and the plugins exist.

    Exit status 1 where a distribution is older than the index's newest version. Prereleases do not count. A
    distribution that the index does not have, or that pip cannot ask it for, is not found. NAME is a plugin or
    distribution; all by default.
    """
    from importlib.util import find_spec

    from packaging.version import Version

    from nxdt_core.errors.plugins import PipMissing, UnknownPlugin
    from nxdt_core.kernel import Kernel
    from nxdt_core.kernel.plugin import LOCAL
    from nxdt_core.kernel.plugin import names as means

    if find_spec("pip") is None:
        raise PipMissing(python=sys.executable)
    plugins = [plugin for plugin in Kernel.start().plugins if plugin.dist != LOCAL]
    for name in names:
        if not any(means(name, name=plugin.name, dist=plugin.dist) for plugin in plugins):
            raise UnknownPlugin(name=name, available=tuple(dict.fromkeys(plugin.name for plugin in plugins)))
    installed = {
        plugin.dist: plugin.version
        for plugin in plugins
        if not names or any(means(name, name=plugin.name, dist=plugin.dist) for name in names)
    }
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        newest = dict(zip(installed, pool.map(_newest, installed), strict=True))
    rows = [
        {"dist": dist, "installed": version, "newest": newest[dist], "state": _state(Version, version, newest[dist])}
        for dist, version in sorted(installed.items())
    ]
    if json_output:
        print_json(rows)
    else:
        cells = [(row["dist"], row["installed"], row["newest"] or "-", row["state"]) for row in rows]
        print_table(("DIST", "INSTALLED", "NEWEST", "STATE"), cells)
        old = [str(row["dist"]) for row in rows if row["state"] == "outdated"]
        if old:
            say(f"\npip install --upgrade {' '.join(old)}")
    ctx.exit(1 if any(row["state"] == "outdated" for row in rows) else 0)


def _newest(dist: str) -> str:
    """Return the newest version of ``dist`` on the index; empty where the index has none."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", dist]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return ""
    found = re.search(r"^Available versions: ([^,\s]+)", done.stdout, flags=re.MULTILINE)
    return found[1] if found is not None and done.returncode == 0 else ""


def _state(version: type, installed: str, newest: str) -> str:
    if not newest:
        return "not found"
    return "outdated" if version(installed) < version(newest) else "ok"


_GROUP = "nxdt.plugins"


def complaints(plugins: Iterable[PluginInfo]) -> Iterator[str]:
    """Yield a line for each thing that is wrong with a plugin; one that is blocked is as its user wants it."""
    from nxdt_core.kernel.plugin import advise, diagnose

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
    from importlib.metadata import distributions

    from nxdt_core.kernel.lock import editable_source

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
