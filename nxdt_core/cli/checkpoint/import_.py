"""``nxdt checkpoint import``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nxdt_core.cli.checkpoint.store import on_all_ranks, print_report
from nxdt_core.cli.terminal import human_size
from nxdt_core.cli.verb import Verb, as_json

if TYPE_CHECKING:
    from nxdt_core.train.weights.importing import Imported


@click.command(
    "import",
    cls=Verb,
    examples=(
        "nxdt checkpoint import Llama-3.1-8B checkpoints/llama-3.1-8b",
        "nxdt checkpoint import Llama-3.1-8B checkpoints/llama-3.1-8b --config my_run.yaml",
        "nxdt checkpoint import a--step=100.ckpt checkpoints/a --config my_run.yaml --weights-only",
    ),
)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--config", metavar="CONFIG", help="YAML file or recipe:NAME of the model, instead of the one in SRC.")
@click.option("--format", "format_", help="Format of SRC, instead of a detected one.")
@click.option("--weights-only", is_flag=True, help="Leave out the optimizer's state, also where it is not whole.")
@as_json
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_context
def import_(
    ctx: click.Context,
    source: str,
    target: str,
    config: str | None,
    format_: str | None,
    weights_only: bool,
    json_output: bool,
    overrides: tuple[str, ...],
) -> None:
    """Make a checkpoint of a model that another program has saved, such as a Hugging Face directory.

    SRC is a directory. DST is what checkpoint.uri says: a directory, or an address of an installed store; it must hold
    no checkpoint yet. A run starts from the weights with checkpoint.resume_from=DST checkpoint.weight_init_only=true.
    Where SRC has optimizer state that is not whole, nothing is imported unless --weights-only is given.
    Memory holds one tensor at a time. Under torchrun or srun the processes divide the tensors.
    """
    from nxdt_core.train.weights.importing import import_checkpoint

    ctx.exit(
        on_all_ranks(
            lambda ranks: import_checkpoint(
                source,
                target,
                config=config,
                overrides=overrides,
                format=format_,
                weights_only=weights_only,
                ranks=ranks,
            ),
            lambda imported: _report(imported, json_output),
        )
    )


def _report(imported: Imported, json_output: bool) -> None:
    what = f"{imported.tensors} tensors, {human_size(imported.size_bytes)}, a model of {imported.model!r}"
    said = f"Imported {imported.source} ({imported.format}) to {imported.target}: {what}."
    print_report(imported, said, json_output)
