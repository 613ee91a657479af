"""``nxdt plugins``: list, inspect, create, trace and pin plugins, find their problems and newer versions."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import click
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from nxdt_core.api import ENTRY_POINT_GROUP
from nxdt_core.cli.terminal import print_facts, print_table, shade
from nxdt_core.cli.verb import (
    SuggestingGroup,
    as_json,
    attributes,
    complete_plugin,
    config_arguments,
    optional_config_arguments,
    print_json,
    print_note,
    say,
)
from nxdt_core.config import load
from nxdt_core.config.load import start_kernel_of
from nxdt_core.config.show import hide_secrets
from nxdt_core.errors import NxdtError
from nxdt_core.errors.plugins import KitsMissing, PipMissing, UnknownPlugin
from nxdt_core.kernel import Kernel, PluginPolicy, RegisteredComponent
from nxdt_core.kernel.hookspecs import HOOKS
from nxdt_core.kernel.lock import editable_source, write_lock
from nxdt_core.kernel.plugin import LOCAL, PluginInfo, advise, diagnose, names, plugin_notes
from nxdt_core.scaffold.repository import write_repository
from nxdt_core.system.visible_text import visible

_TIMEOUT_S = 60
_AT_ONCE = 4
_SLOWEST = 20
"""Rows of the table."""
_LOCK = "nxdt-plugins.lock"
_NAMES_SHOWN = 4
"""Components of a plugin that a listing names; it counts more by kind."""
_KITS = "nxdt_testing.plugin_check"
"""Module of the distribution nxdt-testing, which the core does not require."""


@click.group(
    cls=SuggestingGroup,
    examples=("nxdt plugins list", "nxdt plugins show llama", "nxdt plugins lock"),
)
def plugins() -> None:
    """List and check plugins, which are installed with pip and found automatically."""


@plugins.command("list", examples=("nxdt plugins list", "nxdt plugins list --kind optimizer"))
@click.option("--kind", help="List the components of this kind and the plugins that offer them.")
@as_json
def list_(kind: str | None, json_output: bool) -> None:
    """List all plugins, also those that cannot be used, with the reason.

    For a plugin with more than four components, the table shows how many there are; `nxdt plugins show` names them.

    Notes below the table name plugins whose entry module imports heavy libraries, and plugins with incomplete
    metadata, such as no range of nxdt-core.
    """
    kernel = Kernel.start()
    if kind is not None:
        chosen = kernel.registry.all(kind)
        if json_output:
            print_json([_described(one, **attributes(one, "plugin", "dist", "version")) for one in chosen])
            return
        rows = [(_row(one)[1], one.plugin, f"{one.dist} {one.version}".rstrip(), one.record.summary) for one in chosen]
        print_table(("NAME", "PLUGIN", "DIST", "SUMMARY"), rows)
        return
    if json_output:
        print_json([_as_object(kernel, plugin) for plugin in kernel.plugins])
        return
    table = []
    for plugin in kernel.plugins:
        components = _components(kernel, plugin)
        offers = [component.record.name for component in components]
        if len(components) > _NAMES_SHOWN:  # "13 optimizers, 14 schedules"
            offers = []
            for offered, count in Counter(component.kind for component in components).items():
                noun = offered.replace("_", " ")
                plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
                offers.append(f"{count} {noun if count == 1 else plural}")
        cell = plugin.reason or ", ".join(offers)
        table.append((plugin.name, plugin.dist, plugin.version, shade(plugin.state), cell))
    header = ("NAME", "DIST", "VERSION", "STATE", "OFFERS, OR WHY NOT")
    print_table(header, table, optional=("DIST", "VERSION"))
    hints = [f"plugin {plugin.label}: {hint}" for plugin in kernel.plugins for hint in plugin.hints]
    for note in (*plugin_notes(kernel.plugins), *hints):
        print_note(note)


@plugins.command("doctor", examples=("nxdt plugins doctor", "nxdt plugins doctor my_run.yaml --json"))
@optional_config_arguments
@as_json
@click.pass_context
def doctor(ctx: click.Context, source: str | None, overrides: tuple[str, ...], json_output: bool) -> None:
    """Report what is wrong with the installed plugins; the exit status is 1 if something is.

    With CONFIG, the section `plugins` of that configuration decides which plugins are imported, and entries of
    plugins.allow, block and prefer that name no installed plugin are found, too.

    It reports plugins that cannot be used; entry modules that import heavy libraries or implement no hook;
    distributions that require no range of nxdt-core; and editable installations whose metadata are older than their
    pyproject.toml. The table shows how long each entry module takes.
    """
    kernel = Kernel.start() if source is None else start_kernel_of(source, overrides)
    unused = [f"plugins: no installed plugin is called {entry!r}" for entry in kernel.unmatched_policy()]
    problems = [*map(hide_secrets, (*complaints(kernel.plugins), *unused))]
    if json_output:
        seconds = {plugin.name: round(plugin.import_s, 6) for plugin in kernel.plugins if plugin.state == "ok"}
        print_json({"import_s": seconds, "problems": problems})
    else:
        slowest = sorted(kernel.plugins, key=lambda plugin: -plugin.import_s)
        rows = [(info.name, info.dist, shade(info.state), f"{1000 * info.import_s:.1f}") for info in slowest]
        print_table(("NAME", "DIST", "STATE", "IMPORT MS"), rows)
        click.echo()
        for line in problems:
            click.echo(f"{click.style('problem', fg='red')}: {visible(line)}")
        if not problems:
            click.echo(f"{click.style('ok', fg='green')}: nothing is wrong with {len(kernel.plugins)} plugins")
    ctx.exit(1 if problems else 0)


@plugins.command("check", examples=("nxdt plugins check llama", "nxdt plugins check path/to/my-plugin"))
@click.argument("name", shell_complete=complete_plugin)
@as_json
@click.pass_context
def check(ctx: click.Context, name: str, json_output: bool) -> None:
    """Run the conformance kits on a plugin; exit status 1 where it breaks a requirement.

    NAME is the name of an installed plugin or distribution, or the directory of a plugin's repository, whose own tests
    are run. A plugin of which no component can be tested without its repository is not accepted. It needs
    `nxdt-testing`.
    """
    if find_spec(_KITS.partition(".")[0]) is None:
        raise KitsMissing(name=name)
    kits = import_module(_KITS)
    results = kits.check_directory(Path(name)) if Path(name).is_dir() else kits.check_plugin(name)
    components = set() if Path(name).is_dir() else {result.of for result in results} - {"plugin"}
    tested = {result.of for result in results if result.of in components and result.state != "skip"}
    failed = sum(result.state == "fail" for result in results)
    if json_output:
        print_json([attributes(result, "of", "requirement", "state", "text") for result in results])
    else:
        colours = {"pass": "green", "skip": "yellow", "fail": "red"}
        rows = [
            (result.of, result.requirement, click.style(result.state, fg=colours[result.state]), result.text)
            for result in results
        ]
        print_table(("OF", "REQUIREMENT", "RESULT", "WHY"), rows)
        counted = f", {len(tested)} of {len(components)} components tested" if components else ""
        click.echo(f"\n{len(results)} requirements, {failed} broken{counted}")
    ctx.exit(1 if failed or not results or (components and not tested) else 0)


@plugins.command(
    "new",
    examples=("nxdt plugins new model my-model", "nxdt plugins new schedule my-schedule --directory plugins/mine"),
)
@click.argument("kind")
@click.argument("name")
@click.option("--directory", type=click.Path(path_type=Path), help="Where to write it. Default: a directory NAME here.")
@click.option("--plain", is_flag=True, help="Of a model: in plain torch, instead of a member of Llama's family.")
def new(kind: str, name: str, directory: Path | None, plain: bool) -> None:
    """Write the repository of a new plugin, which installs and passes its own tests.

    KIND is a kind of components, such as model, dataset, tokenizer, optimizer, schedule, precision, store, adapter,
    objective, engine or callback. NAME is that of the distribution, the plugin and the component. The repository
    has the component, its configuration, tests by the conformance kit, a CI file and a README; that of a model has a
    recipe, too.
    """
    target = Path(name) if directory is None else directory
    for path in write_repository(kind, name, target, plain=plain):
        say(str(target / path))
    say(f"\ncd {target} && pip install . && nxdt plugins check .")


@plugins.command("show", examples=("nxdt plugins show llama", "nxdt plugins show nxdt-plugin-llama"))
@click.argument("name", shell_complete=complete_plugin)
@as_json
def show(name: str, json_output: bool) -> None:
    """Show one plugin: state, location, and each component with what it supports.

    NAME is the plugin's name or that of its distribution.
    """
    kernel = Kernel.start()
    chosen = _called(name, kernel.plugins)
    if json_output:
        more = ("module", "location", "requires")
        print_json(
            [
                {
                    **_as_object(kernel, plugin),
                    **attributes(plugin, *more),
                    "components": [
                        {"kind": component.kind, **_described(component)} for component in _components(kernel, plugin)
                    ],
                }
                for plugin in chosen
            ]
        )
        return
    for number, plugin in enumerate(chosen):
        click.echo(nl=number > 0)
        facts = [
            ("plugin", plugin.name),
            ("distribution", f"{plugin.dist} {plugin.version}".rstrip()),
            ("state", shade(plugin.state)),
            ("reason", plugin.reason),
            ("note", plugin.note),
            ("to change", "; ".join(plugin.hints)),
            ("module", plugin.module),
            ("location", plugin.location),
            ("requires", ", ".join(plugin.requires)),
        ]
        print_facts([(name, value) for name, value in facts if value])
        components = _components(kernel, plugin)
        if components:
            click.echo()
            rows = [_row(component) for component in components]
            print_table(("KIND", "NAME", "SUPPORTS", "SUMMARY"), rows, optional=("SUPPORTS",))


@plugins.command("hooks", examples=("nxdt plugins hooks", "nxdt plugins hooks --json"))
@as_json
def hooks(json_output: bool) -> None:
    """List the hooks, and the plugins that implement each."""
    kernel = Kernel.start()
    rows, objects = [], []
    for hook, specification in HOOKS.items():
        listeners = [each.plugin_name.rpartition(":")[2] for each in kernel.manager.implementations(hook)]
        sentence = (specification.__doc__ or "").split("\n", 1)[0].partition(". ")[0].rstrip(".")
        summary = re.sub(r"(:\w+:)?`+([^`]+)`+", r"\2", sentence)
        rows.append((hook, ", ".join(listeners) or "-", summary))
        objects.append({"hook": hook, "plugins": listeners, "summary": summary})
    if json_output:
        print_json(objects)
        return
    print_table(("HOOK", "PLUGINS", "SUMMARY"), rows)


@plugins.command("lock", examples=("nxdt plugins lock", "nxdt plugins lock deploy/plugins.lock"))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=_LOCK)
def lock(file: Path) -> None:
    """Write the versions and digests of all usable plugins to FILE (nxdt-plugins.lock).

    A configuration with plugins.lock refuses to run with other plugins.
    """
    write_lock(Kernel.start().plugins, file)
    say(f"wrote {file}", err=True)


@plugins.command("verify", examples=("nxdt plugins verify", "nxdt plugins verify deploy/plugins.lock --json"))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=_LOCK)
@as_json
@click.pass_context
def verify(ctx: click.Context, file: Path, json_output: bool) -> None:
    """Compare the installed plugins with FILE (nxdt-plugins.lock); exit status 2 where they differ."""
    try:
        Kernel.start(PluginPolicy(lock=file))
    except NxdtError as error:
        if not json_output:
            raise
        problem = {"code": error.code, "message": error.what(), "fix": error.do()}
        print_json({"file": str(file), "ok": False, "problem": problem})
        ctx.exit(error.exit_status)
    if json_output:
        print_json({"file": str(file), "ok": True, "problem": None})
        return
    click.echo(f"{click.style('ok', fg='green')}: the plugins are those of {visible(str(file))}")


@plugins.command(
    "trace",
    short_help="Show which hook implementations ran, whose, and how long.",
    examples=("nxdt plugins trace recipe:llama-tiny", "nxdt plugins trace my_run.yaml trainer.max_steps=10 --json"),
)
@config_arguments
@as_json
def trace(source: str, overrides: tuple[str, ...], json_output: bool) -> None:
    """Load CONFIG as a run does, and show each call of a plugin: its hook, how long it took, and what it gave.

    A second table shows the keys whose default came from a plugin. Nothing is trained.
    """
    config = load(source, overrides)
    calls = config.kernel.manager.calls
    values = {key: config.tree.as_displayed(key) for key, origin in config.origins.items() if origin.kind == "plugin"}
    defaults = [
        {"key": key, "plugin": config.origins[key].where, "value": value}
        for key, value in values.items()
        if not isinstance(value, dict | list)
    ]
    if json_output:
        rows = [{**attributes(call, "hook", "plugin", "dist", "outcome"), "s": call.seconds} for call in calls]
        print_json({"calls": rows, "defaults": defaults})
        return
    slowest = sorted(calls, key=lambda call: -call.seconds)[:_SLOWEST]
    table = [(call.hook, call.plugin, f"{1000 * call.seconds:.2f}", call.outcome, call.dist) for call in slowest]
    print_table(("HOOK", "PLUGIN", "MS", "GAVE", "DIST"), table, right=("MS",))
    total = 1000 * sum(call.seconds for call in calls)
    say(f"{len(calls)} calls of {len({(call.dist, call.plugin) for call in calls})} plugins, {total:.1f} ms")
    if defaults:
        say("")
        print_table(("KEY", "PLUGIN", "DEFAULT"), [(row["key"], row["plugin"], str(row["value"])) for row in defaults])


@plugins.command(
    "outdated",
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
    if find_spec("pip") is None:
        raise PipMissing(python=sys.executable)
    chosen = [plugin for plugin in Kernel.start().plugins if plugin.dist != LOCAL]
    if names:
        chosen = list(chain.from_iterable(_called(name, chosen) for name in names))
    installed = {plugin.dist: plugin.version for plugin in chosen}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        newest = dict(zip(installed, pool.map(_newest, installed), strict=True))
    rows = []
    for dist, version in sorted(installed.items()):
        state = "not found"
        if newest[dist]:
            state = "outdated" if Version(version) < Version(newest[dist]) else "ok"
        rows.append({"dist": dist, "installed": version, "newest": newest[dist], "state": state})
    old = [row["dist"] for row in rows if row["state"] == "outdated"]
    if json_output:
        print_json(rows)
    else:
        cells = [(row["dist"], row["installed"], row["newest"] or "-", row["state"]) for row in rows]
        print_table(("DIST", "INSTALLED", "NEWEST", "STATE"), cells)
        if old:
            say(f"\npip install --upgrade {' '.join(old)}")
    ctx.exit(1 if old else 0)


def _newest(dist: str) -> str:
    """Return the newest version of ``dist`` on the index; empty where the index has none."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", dist]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return ""
    match = re.search(r"^Available versions: ([^,\s]+)", done.stdout, flags=re.MULTILINE)
    return match[1] if match is not None and done.returncode == 0 else ""


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
    where they agree, and of other installations. (pip writes metadata at installation.)

    Compared are the entry points of plugins, the version and the requirements, where ``pyproject.toml`` has them.
    """
    dist = next(iter(distributions(name=plugin.dist, path=[plugin.location])), None)
    source = None if dist is None else editable_source(dist)
    if dist is None or source is None:
        return ""
    if not source.is_dir():
        return f"it is installed from {source}, which does not exist"
    try:
        project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        required = {Requirement(line) for line in project.get("dependencies", ())}
        installed = {Requirement(line) for line in dist.requires or () if "extra ==" not in line}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, InvalidRequirement):
        return ""
    different = []
    if {entry.name: entry.value for entry in dist.entry_points if entry.group == ENTRY_POINT_GROUP} != project.get(
        "entry-points", {}
    ).get(ENTRY_POINT_GROUP, {}):
        different.append("entry points")
    if project.get("version") not in (None, dist.version):
        different.append("version")
    if "dependencies" in project and required != installed:
        different.append("requirements")
    if not different:
        return ""
    older = f"its installed metadata are older than {source / 'pyproject.toml'}: other {' and '.join(different)}"
    return f"{older}; run 'pip install -e {source}' again"


def _called(name: str, plugins: Sequence[PluginInfo]) -> list[PluginInfo]:
    """Return the plugins of this name or distribution.

    Raises:
        UnknownPlugin: there is none.
    """
    chosen = [plugin for plugin in plugins if names(name, name=plugin.name, dist=plugin.dist)]
    if not chosen:
        raise UnknownPlugin(name=name, available=tuple(dict.fromkeys(plugin.name for plugin in plugins)))
    return chosen


def _components(kernel: Kernel, plugin: PluginInfo) -> list[RegisteredComponent]:
    """Return the components that one plugin registered, in the order of the kinds."""
    every = [c for kind in kernel.registry.kinds() for c in kernel.registry.all(kind.name)]
    return [c for c in every if plugin.state == "ok" and (c.plugin, c.dist) == (plugin.name, plugin.dist)]


def _described(component: RegisteredComponent, **origin: str) -> dict[str, object]:
    """One component in ``--json``; keys are only ever added."""
    record = component.record
    named = {"name": record.name, "aliases": list(record.aliases)}
    return {**named, **origin, "capabilities": sorted(record.capabilities), "summary": record.summary}


def _as_object(kernel: Kernel, plugin: PluginInfo) -> dict[str, object]:
    """One plugin in ``--json``; keys are only ever added."""
    return {
        **attributes(plugin, "name", "dist", "version", "state", "reason", "note", "hints"),
        "components": [{"kind": c.kind, "name": c.record.name} for c in _components(kernel, plugin)],
    }


def _row(component: RegisteredComponent) -> tuple[str, str, str, str]:
    """Kind, name with its aliases, capabilities and summary of one component."""
    record = component.record
    names = " = ".join((record.name, *record.aliases))
    return component.kind, names, ", ".join(sorted(record.capabilities)), record.summary
