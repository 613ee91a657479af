"""``nxdt config``: check, show, describe and migrate configurations, without building anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nxdt_core.cli.config.migrate import migrate
from nxdt_core.cli.groups import VerbGroup
from nxdt_core.cli.terminal.table import print_facts
from nxdt_core.cli.verb import as_json, config_arguments, print_json, print_note, say
from nxdt_core.visible_text import visible

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig

__all__ = ["config"]


@click.group(
    cls=VerbGroup,
    short_help="Check, show and describe configurations.",
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
    """Check a configuration: report every mistake at once, with file and line, or say what would run.

    A model of transformers (model.name=hf) is also built without memory, in the layout of the run. The exit status is
    1 where a recipe has values that only you know, such as the paths of your data, and 2 where something is wrong.
    """
    from nxdt_core.cli.config.check_report import as_object, failed_as_object
    from nxdt_core.cli.config.layout_check import check_layout
    from nxdt_core.cli.config.vocabulary_check import data_notes, vocabulary_notes
    from nxdt_core.config import load
    from nxdt_core.config.resolved import values_to_set
    from nxdt_core.errors import NxdtError

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
    `# yaml-language-server: $schema=nxdt.schema.json`.
    """
    from nxdt_core.config import json_schema
    from nxdt_core.kernel import Kernel

    print_json(json_schema(Kernel.start()))


config.add_command(migrate)


def _origins(resolved: ResolvedConfig) -> dict[str, dict[str, object]]:
    """Where each value comes from, by key path."""
    from nxdt_core.config.secrets import Redaction

    redact = Redaction(resolved.tree)
    return {
        path: {"kind": origin.kind, "where": redact(origin.where), "line": origin.line or None}
        for path, origin in resolved.origins.items()
    }


def _summary(resolved: ResolvedConfig) -> list[tuple[str, str]]:
    """What would run, one line a slot of the configuration."""
    facts = []
    for slot, selected in resolved.components.items():
        if selected is not None:
            component = selected.component
            facts.append((slot, f"{component.record.name}  ({f'{component.dist} {component.version}'.strip()})"))
    return [*facts, ("run directory", str(resolved.run_dir)), ("checkpoints", resolved.checkpoint_uri)]
