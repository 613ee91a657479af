"""``nxdt config``: check, show, describe and migrate configurations, without building anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.groups import SuggestingGroup
from nxdt_core.cli.terminal import print_facts
from nxdt_core.cli.verb import Verb, as_json, config_arguments, print_json, print_note, say
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import ConfigError, ConfigProblem
from nxdt_core.system.visible_text import visible

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig
    from nxdt_core.protocols.migration import MigratedConfig, MigratedKey


@click.command(
    cls=Verb,
    short_help="Convert a configuration of another program.",
    examples=(
        "nxdt config migrate hf_llama3_8B_config.yaml --from nxdt -o my_run.yaml",
        "nxdt config migrate megatron_gpt_config.yaml --from nemo -o my_run.yaml --report my_run.md",
    ),
)
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "framework",
    metavar="NAME",
    help="Migration of the program that FILE is of, such as nxdt, nemo or nnm; by default the one that recognises it.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The file to write.")
@click.option("--report", type=click.Path(path_type=Path), help="Write a report of every key, as Markdown.")
@click.option("--force", is_flag=True, help="Replace the files where they exist.")
@as_json
def migrate(
    source: Path, framework: str | None, output: Path, report: Path | None, force: bool, json_output: bool
) -> None:
    """Rewrite a configuration of another program for nxdt, and report every key.

    Plugins bring the migrations: nxdt-plugin-migrate those of NxD Training (nxdt), NeMo 1.x (nemo) and
    neuronx-nemo-megatron (nnm), which keep order and comments.

    Each key is mapped, renamed, changed, unneeded, off (unset or switched off), ignored (the other program never read
    it) or unsupported. Keys are added where leaving them out would change something. The values and paths that are
    still to be set are listed at the end. A file of another program is refused.
    """
    from nxdt_core.config.migration import migrate as migrated
    from nxdt_core.errors.configuration import MigrationTargetExists
    from nxdt_core.kernel import Kernel

    for path in (output, report):
        if path is not None and path.exists() and not force:
            raise MigrationTargetExists(path=str(path))
    done = migrated(source, output, framework, Kernel.start())
    _write(output, done.text)
    if report is not None:
        _write(report, _report_markdown(done))
    if json_output:
        print_json(_report_json(done))
    else:
        _print(done, report)


def _write(path: Path, text: str) -> None:
    from nxdt_core.errors.configuration import MigrationTargetUnwritable
    from nxdt_core.system.regular_files import replace_text

    try:
        replace_text(path, text)
    except OSError as error:
        raise MigrationTargetUnwritable(path=str(path), reason=(error.strerror or str(error)).lower()) from error


def _print(done: MigratedConfig, report: Path | None) -> None:
    from nxdt_core.config.migration import summary

    say(f"Wrote {done.target} from {done.source} ({done.program}).")
    print_facts(summary(done))
    if report is not None:
        say(f"Wrote {report}: every key, with its line and reason.")
    lost = [(f"{row.key} (line {row.line})", row.reason) for row in done.keys if row.verdict == "unsupported"]
    for title, entries in (
        ("Not carried over:", lost),
        ("Still to be set:", done.to_set),
        ("nxdt config check also reports:", done.remaining),
    ):
        if entries:
            click.echo(title)
            for key, text in entries:
                say(f"  {key}: {text}")


_MEANINGS: dict[str, str] = {
    "mapped": "kept under its name",
    "renamed": "kept under another name",
    "changed": "kept with another value",
    "added": "not in the file; written since leaving it out would mean something else here",
    "unneeded": "left out; nothing is lost without it",
    "off": "left out; it is unset, switched off, or says what holds here anyway",
    "ignored": "left out; the framework that the file is of did not read it",
    "unsupported": "left out; it asks for something that is not done here",
}


def _report_markdown(migration: MigratedConfig) -> str:
    """Return the report as a page."""
    from nxdt_core.config.migration import summary

    lines = [f"# {migration.source} → {migration.target}", "", f"A file of {migration.program}.", ""]
    lines += ["| verdict | keys | meaning |", "|---|---|---|"]
    lines += [f"| {verdict} | {count} | {_MEANINGS[verdict]} |" for verdict, count in summary(migration)]
    lines += ["", "## Still to be set", "", *_entries(migration.to_set)]
    lines += ["", "## What `nxdt config check` says of it now", "", *_entries(migration.remaining)]
    lines += ["", "## Every key", "", "| line | key | value | verdict | now | why |", "|---|---|---|---|---|---|"]
    lines += [_row(row) for row in migration.keys]
    return "\n".join(lines) + "\n"


def _report_json(migration: MigratedConfig) -> dict[str, Any]:
    """Return the report of a migration as values of JSON."""
    return {
        "source": str(migration.source),
        "target": str(migration.target),
        "framework": migration.program,
        "keys": [
            {
                "key": row.key,
                "line": row.line or None,
                "verdict": row.verdict,
                "target": row.target or None,
                "value": row.value,
                "reason": row.reason or None,
            }
            for row in migration.keys
        ],
        "to_set": [{"key": key, "reason": reason} for key, reason in migration.to_set],
        "remaining": [{"key": key, "problem": problem} for key, problem in migration.remaining],
    }


def _entries(entries: tuple[tuple[str, str], ...]) -> list[str]:
    return [f"- `{key}`: {text}" for key, text in entries] or ["Nothing."]


def _row(row: MigratedKey) -> str:
    cells = (
        str(row.line or ""),
        f"`{row.key}`",
        f"`{row.value}`" if row.value else "",
        row.verdict,
        f"`{row.target}`" if row.target else "",
        row.reason,
    )
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


@click.group(
    cls=SuggestingGroup,
    examples=("nxdt config check my_run.yaml", "nxdt config show recipe:llama-tiny"),
)
def config() -> None:
    """Look at configurations without building anything. CONFIG is a YAML file or recipe:NAME."""


@config.command(
    "check",
    examples=(
        "nxdt config check my_run.yaml",
        "nxdt config check my_run.yaml trainer.max_steps=1000",
        "nxdt config check my_run.yaml --json",
    ),
)
@config_arguments
@as_json
@click.pass_context
def check(ctx: click.Context, source: str, overrides: tuple[str, ...], json_output: bool) -> None:
    """Check a configuration: report every mistake at once, with file and line, or show what would run.

    A model of transformers (model.name=hf) is also built without memory, in the layout of the run. The exit status is
    1 where a recipe has values that only you know, such as the paths of your data, and 2 where something is wrong.
    """
    from nxdt_core.cli.checks import check_layout, data_notes, values_to_set, vocabulary_notes
    from nxdt_core.config import load

    try:
        resolved = load(source, overrides)
        notes = [*resolved.notes, *data_notes(resolved), *vocabulary_notes(resolved)]
        check_layout(resolved)
    except NxdtError as error:
        if not json_output:
            raise
        print_json(failed_as_object(source, error))
        ctx.exit(error.exit_status)
    to_set = values_to_set(resolved)
    if json_output:
        print_json(as_object(resolved, notes, to_set))
        ctx.exit(1 if to_set else 0)
    for note in notes:
        print_note(note)
    if to_set:
        count = "1 value" if len(to_set) == 1 else f"{len(to_set)} values"
        click.echo(f"{click.style(f'{count} to set', fg='yellow')}: {visible(', '.join(to_set))}")
    else:
        click.echo(f"{click.style('ok', fg='green')}: {visible(source)}")
    print_facts(_summary(resolved))
    ctx.exit(1 if to_set else 0)


@config.command(
    "show",
    examples=(
        "nxdt config show recipe:llama-tiny",
        "nxdt config show my_run.yaml --set",
        "nxdt config show my_run.yaml --json",
    ),
)
@config_arguments
@click.option("--set", "only_set", is_flag=True, help="Leave out values that are defaults.")
@as_json
def show(source: str, overrides: tuple[str, ...], only_set: bool, json_output: bool) -> None:
    """Print every value of a configuration and where it comes from, as YAML that can be trained again."""
    from nxdt_core.config import load, render_show

    resolved = load(source, overrides)
    if json_output:
        print_json({"config": resolved.to_dict(), "origins": _origins(resolved)})
    else:
        say(render_show(resolved, only_set=only_set), end="")


@config.command("schema", examples=("nxdt config schema > nxdt.schema.json",))
def schema() -> None:
    """Print a JSON Schema of configurations, with the keys of all installed plugins.

    Editors with a YAML language server complete and explain keys with it, where the file's first line is
    `# yaml-language-server: $schema=nxdt.schema.json`, as `nxdt recipes show` prints it.
    """
    from nxdt_core.config import json_schema
    from nxdt_core.kernel import Kernel

    print_json(json_schema(Kernel.start()))


config.add_command(migrate)


def _origins(resolved: ResolvedConfig) -> dict[str, dict[str, object]]:
    """Return the origin of each value, by key path."""
    from nxdt_core.config.secrets import Redaction

    redact = Redaction(resolved.tree)
    return {
        path: {"kind": origin.kind, "where": redact(origin.where), "line": origin.line or None}
        for path, origin in resolved.origins.items()
    }


def _summary(resolved: ResolvedConfig) -> list[tuple[str, str]]:
    """Return (slot, component) for each slot of the configuration, and the places where the run writes."""
    facts = []
    for slot, selected in resolved.components.items():
        if selected is not None:
            component = selected.component
            facts.append((slot, f"{component.record.name}  ({f'{component.dist} {component.version}'.strip()})"))
    return [*facts, ("run directory", str(resolved.run_dir)), ("checkpoints", resolved.checkpoint_uri)]


def as_object(config: ResolvedConfig, notes: Sequence[str], to_set: Sequence[str]) -> dict[str, object]:
    """Return what would run; ``to_set`` names the values that are placeholders."""
    used = {slot: found.component for slot, found in config.components.items() if found is not None}
    return {
        "source": config.source,
        "ok": not to_set,
        "problems": [],
        "notes": list(notes),
        "to_set": list(to_set),
        "components": {
            slot: {"name": chosen.record.name, "dist": chosen.dist, "version": chosen.version}
            for slot, chosen in used.items()
        },
        "run_dir": str(config.run_dir),
        "checkpoint_uri": config.checkpoint_uri,
    }


def failed_as_object(source: str, error: NxdtError) -> dict[str, object]:
    """Return what is wrong with a configuration, with the same keys."""
    problems = [_problem(each) for each in (error.problems if isinstance(error, ConfigError) else (error,))]
    nothing: dict[str, object] = {"notes": [], "to_set": [], "components": {}, "run_dir": None, "checkpoint_uri": None}
    return {"source": source, "ok": False, "problems": problems, **nothing}


def _problem(error: NxdtError) -> dict[str, object]:
    placed = error if isinstance(error, ConfigProblem) else None
    return {
        "code": placed.shown_code if placed else error.code,
        "place": placed.place if placed else None,
        "line": placed.line or None if placed else None,
        "key": placed.key or None if placed else None,
        "message": error.what(),
        "fix": error.do() or None,
    }
