"""``nxdt plugins outdated``: installed versions of plugins, compared with the index that pip is configured for."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import click

from nxdt_core.cli.terminal.table import print_table
from nxdt_core.cli.verb import Verb, as_json, print_json, say

__all__ = ["outdated"]

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
    from nxdt_core.kernel.policy import names as means

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
