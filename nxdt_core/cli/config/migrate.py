"""``nxdt config migrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxdt_core.cli.terminal.table import print_facts
from nxdt_core.cli.verb import Verb, as_json, print_json, say

if TYPE_CHECKING:
    from nxdt_core.protocols.migration import MigratedConfig

__all__ = ["migrate"]


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
@click.option("--report", type=click.Path(path_type=Path), help="Write what became of every key, as Markdown.")
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
    from nxdt_core.config.migration import report_json, report_markdown
    from nxdt_core.errors.configuration import MigrationTargetExists
    from nxdt_core.kernel import Kernel

    for path in (output, report):
        if path is not None and path.exists() and not force:
            raise MigrationTargetExists(path=str(path))
    done = migrated(source, output, framework, Kernel.start())
    _write(output, done.text)
    if report is not None:
        _write(report, report_markdown(done))
    if json_output:
        print_json(report_json(done))
    else:
        _print(done, report)


def _write(path: Path, text: str) -> None:
    from nxdt_core.errors.configuration import MigrationTargetUnwritable
    from nxdt_core.regular_files import replace_text

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
