"""``nxdt plugins``: list, inspect, create, trace and pin plugins."""

from __future__ import annotations

import re
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.groups import SuggestingGroup
from nxdt_core.cli.plugin_checks import outdated
from nxdt_core.cli.terminal import print_facts, print_table, shade
from nxdt_core.cli.verb import (
    Verb,
    as_json,
    complete_plugin,
    config_arguments,
    optional_config_arguments,
    print_json,
    print_note,
    say,
)
from nxdt_core.system.visible_text import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nxdt_core.config import ResolvedConfig
    from nxdt_core.kernel import Kernel, RegisteredComponent
    from nxdt_core.kernel.plugin import PluginInfo


_SLOWEST = 20
"""Rows of the table."""


@click.command(
    "trace",
    cls=Verb,
    short_help="Show which hook implementations ran, whose, and how long.",
    examples=("nxdt plugins trace recipe:llama-tiny", "nxdt plugins trace my_run.yaml trainer.max_steps=10 --json"),
)
@config_arguments
@as_json
def trace(source: str, overrides: tuple[str, ...], json_output: bool) -> None:
    """Load CONFIG as a run does, and show each call of a plugin: its hook, how long it took, and what it gave.

    A second table shows the keys whose default came from a plugin. Nothing is trained.
    """
    from nxdt_core.config import load
    from nxdt_core.kernel.hooks import traced_hooks

    with traced_hooks() as calls:
        config = load(source, overrides)
    defaults = _defaults(config)
    if json_output:
        rows = [
            {"hook": each.hook, "plugin": each.plugin, "dist": each.dist, "outcome": each.outcome, "s": each.seconds}
            for each in calls
        ]
        print_json({"calls": rows, "defaults": defaults})
        return
    slowest = sorted(calls, key=lambda each: -each.seconds)[:_SLOWEST]
    table = [(each.hook, each.plugin, f"{1000 * each.seconds:.2f}", each.outcome, each.dist) for each in slowest]
    print_table(("HOOK", "PLUGIN", "MS", "GAVE", "DIST"), table, right=("MS",))
    total = 1000 * sum(each.seconds for each in calls)
    say(f"{len(calls)} calls of {len({(each.dist, each.plugin) for each in calls})} plugins, {total:.1f} ms")
    if defaults:
        say("")
        print_table(("KEY", "PLUGIN", "DEFAULT"), [(row["key"], row["plugin"], str(row["value"])) for row in defaults])


def _defaults(config: ResolvedConfig) -> list[dict[str, Any]]:
    """Return the keys whose value a plugin's hook gave."""
    found = []
    for key, origin in config.origins.items():
        value = config.tree.as_shown(key)
        if origin.kind == "plugin" and not isinstance(value, dict | list):
            found.append({"key": key, "plugin": origin.where, "value": value})
    return found


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
    from nxdt_core.kernel.plugin import plugin_hints, plugin_notes

    kernel = _start_kernel()
    if kind is not None:
        _list_kind(kernel, kind, json_output)
        return
    if json_output:
        print_json([_as_object(kernel, plugin) for plugin in kernel.plugins])
        return
    rows = []
    for plugin in kernel.plugins:
        offers = plugin.reason or _offers(_components(kernel, plugin))
        rows.append((plugin.name, plugin.dist, plugin.version, shade(plugin.state), offers))
    header = ("NAME", "DIST", "VERSION", "STATE", "OFFERS, OR WHY NOT")
    print_table(header, rows, optional=("DIST", "VERSION"))
    for note in (*plugin_notes(kernel.plugins), *plugin_hints(kernel.plugins)):
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
    from nxdt_core.cli.plugin_checks import complaints
    from nxdt_core.config.secrets import hide_secrets

    kernel = _start_kernel(source, overrides)
    unused = [f"plugins: no installed plugin is called {entry!r}" for entry in kernel.unmatched_policy()]
    found = [*map(hide_secrets, (*complaints(kernel.plugins), *unused))]
    if json_output:
        seconds = {plugin.name: round(plugin.import_s, 6) for plugin in kernel.plugins if plugin.state == "ok"}
        print_json({"import_s": seconds, "problems": found})
    else:
        slowest = sorted(kernel.plugins, key=lambda plugin: -plugin.import_s)
        rows = [(each.name, each.dist, shade(each.state), f"{1000 * each.import_s:.1f}") for each in slowest]
        print_table(("NAME", "DIST", "STATE", "IMPORT MS"), rows)
        click.echo()
        for line in found:
            click.echo(f"{click.style('problem', fg='red')}: {visible(line)}")
        if not found:
            click.echo(f"{click.style('ok', fg='green')}: nothing is wrong with {len(kernel.plugins)} plugins")
    ctx.exit(1 if found else 0)


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
    from nxdt_core.errors.plugins import KitsMissing

    if find_spec(_KITS.partition(".")[0]) is None:
        raise KitsMissing(name=name)
    kits = import_module(_KITS)
    results = kits.check_directory(Path(name)) if Path(name).is_dir() else kits.check_plugin(name)
    components = set() if Path(name).is_dir() else {each.of for each in results} - {"plugin"}
    tested = {each.of for each in results if each.of in components and each.state != "skip"}
    failed = sum(result.state == "fail" for result in results)
    if json_output:
        print_json([{key: getattr(each, key) for key in ("of", "requirement", "state", "text")} for each in results])
    else:
        colours = {"pass": "green", "skip": "yellow", "fail": "red"}
        rows = [
            (each.of, each.requirement, click.style(each.state, fg=colours[each.state]), each.text) for each in results
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
    from nxdt_core.scaffold.repository import write_repository

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
    from nxdt_core.errors.plugins import UnknownPlugin
    from nxdt_core.kernel.plugin import names

    kernel = _start_kernel()
    chosen = [plugin for plugin in kernel.plugins if names(name, name=plugin.name, dist=plugin.dist)]
    if not chosen:
        raise UnknownPlugin(name=name, available=tuple(dict.fromkeys(plugin.name for plugin in kernel.plugins)))
    if json_output:
        print_json([_with_details(kernel, plugin) for plugin in chosen])
        return
    for number, plugin in enumerate(chosen):
        click.echo(nl=number > 0)
        _print_plugin(kernel, plugin)


@plugins.command("hooks", examples=("nxdt plugins hooks", "nxdt plugins hooks --json"))
@as_json
def hooks(json_output: bool) -> None:
    """List the hooks, and the plugins that implement each."""
    from nxdt_core.kernel.hookspecs import HOOKS

    kernel = _start_kernel()
    rows, objects = [], []
    for hook, specification in HOOKS.items():
        found = reversed(getattr(kernel.manager.hook, hook).get_hookimpls())  # the last one is called first
        listeners = [each.plugin_name.rpartition(":")[2] for each in found]
        summary = _plain_text((specification.__doc__ or "").split("\n", 1)[0])
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
    from nxdt_core.kernel.lock import write_lock

    write_lock(_start_kernel().plugins, file)
    say(f"wrote {file}", err=True)


@plugins.command("verify", examples=("nxdt plugins verify", "nxdt plugins verify deploy/plugins.lock --json"))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=_LOCK)
@as_json
@click.pass_context
def verify(ctx: click.Context, file: Path, json_output: bool) -> None:
    """Compare the installed plugins with FILE (nxdt-plugins.lock); exit status 2 where they differ."""
    from nxdt_core.errors import NxdtError
    from nxdt_core.kernel import Kernel, PluginPolicy

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


plugins.add_command(trace)
plugins.add_command(outdated)


def _start_kernel(source: str | None = None, overrides: Sequence[str] = ()) -> Kernel:
    from nxdt_core.kernel import Kernel

    if source is None:
        return Kernel.start()
    from nxdt_core.config.load import start_kernel_of

    return start_kernel_of(source, overrides)


def _components(kernel: Kernel, plugin: PluginInfo) -> list[RegisteredComponent]:
    """Return the components that one plugin registered, in the order of the kinds."""
    every = [c for kind in kernel.registry.kinds() for c in kernel.registry.all(kind.name)]
    return [c for c in every if plugin.state == "ok" and (c.plugin, c.dist) == (plugin.name, plugin.dist)]


def _offers(components: Sequence[RegisteredComponent]) -> str:
    """``llama, mistral``, or ``13 optimizers, 14 LR schedulers`` of many."""
    if len(components) <= _NAMES_SHOWN:
        return ", ".join(component.record.name for component in components)
    return ", ".join(_counted(count, kind) for kind, count in Counter(c.kind for c in components).items())


def _counted(count: int, kind: str) -> str:
    noun = kind.replace("_", " ").replace("lr ", "LR ")
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def _list_kind(kernel: Kernel, kind: str, json_output: bool) -> None:
    """Print the components of one kind."""
    found = kernel.registry.all(kind)
    if json_output:
        print_json([_described(each, plugin=each.plugin, dist=each.dist, version=each.version) for each in found])
        return
    rows = [(_row(each)[1], each.plugin, f"{each.dist} {each.version}".rstrip(), each.record.summary) for each in found]
    print_table(("NAME", "PLUGIN", "DIST", "SUMMARY"), rows)


def _described(component: RegisteredComponent, **origin: str) -> dict[str, object]:
    """One component in ``--json``; keys are only ever added."""
    record = component.record
    named = {"name": record.name, "aliases": list(record.aliases)}
    return {**named, **origin, "capabilities": sorted(record.capabilities), "summary": record.summary}


def _as_object(kernel: Kernel, plugin: PluginInfo) -> dict[str, object]:
    """One plugin in ``--json``; keys are only ever added."""
    return {
        "name": plugin.name,
        "dist": plugin.dist,
        "version": plugin.version,
        "state": plugin.state,
        "reason": plugin.reason,
        "note": plugin.note,
        "hints": list(plugin.hints),
        "components": [{"kind": c.kind, "name": c.record.name} for c in _components(kernel, plugin)],
    }


def _with_details(kernel: Kernel, plugin: PluginInfo) -> dict[str, object]:
    """One plugin in ``plugins show --json``: what ``list`` has, and more of it."""
    details = [{"kind": each.kind, **_described(each)} for each in _components(kernel, plugin)]
    more = {"module": plugin.module, "location": plugin.location, "requires": list(plugin.requires)}
    return {**_as_object(kernel, plugin), **more, "components": details}


def _print_plugin(kernel: Kernel, plugin: PluginInfo) -> None:
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


def _plain_text(docstring: str) -> str:
    """The first sentence of a docstring without its markup."""
    sentence = docstring.partition(". ")[0].rstrip(".")
    return re.sub(r"(:\w+:)?`+([^`]+)`+", r"\2", sentence)


def _row(component: RegisteredComponent) -> tuple[str, str, str, str]:
    """Kind, name with its aliases, capabilities and summary of one component."""
    record = component.record
    names = " = ".join((record.name, *record.aliases))
    return component.kind, names, ", ".join(sorted(record.capabilities)), record.summary
