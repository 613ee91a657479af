"""``nxdt checkpoint merge-lora`` and ``nxdt checkpoint export-lora``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from nxdt_core.cli.checkpoint.store import EXAMPLE_URI, named_config, on_all_ranks, trusted_keys
from nxdt_core.cli.terminal import human_size
from nxdt_core.cli.verb import Verb, as_json, print_json, say

if TYPE_CHECKING:
    from nxdt_plugin_lora.saved_run import ExportedLora, Merged


@click.command(
    "merge-lora",
    cls=Verb,
    short_help="Merge the LoRA adapter of a checkpoint into its base.",
    examples=(
        f"nxdt checkpoint merge-lora {EXAMPLE_URI} merged",
        f"nxdt checkpoint merge-lora {EXAMPLE_URI}/step-00000040 merged --base Llama-3.1-8B",
    ),
)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--base", metavar="URI", help="The frozen weights, where they are not where the run took them.")
@named_config
@trusted_keys
@as_json
@click.pass_context
def merge_lora(
    ctx: click.Context,
    source: str,
    target: str,
    base: str | None,
    config: str | None,
    trusted: tuple[str, ...],
    json_output: bool,
) -> None:
    """Make a checkpoint of the model that a LoRA run trained, without an adapter.

    SRC is a checkpoint.uri, whose newest complete step is used, or one step of it. DST is a directory or an address
    of an installed store, without checkpoints. `nxdt checkpoint export DST DIR` then writes a directory that
    transformers loads. Memory holds one matrix at a time. Under torchrun or srun the processes divide the matrices.
    """
    from nxdt_core.checkpoint import open_storage
    from nxdt_core.train.weights.saved_config import locate
    from nxdt_core.train.weights.saved_config import named_config as read
    from nxdt_plugin_lora import saved_run

    resolved, keys = read(config, trusted)
    ctx.exit(
        on_all_ranks(
            lambda ranks: saved_run.merge_lora(
                *locate(source, resolved), open_storage(target), base=base, ranks=ranks, config=resolved, trusted=keys
            ),
            lambda merged: _report(merged, json_output, f"Merged {merged.source} into", merged.merged),
        )
    )


def _report(result: Merged | ExportedLora, json_output: bool, done: str, updates: int) -> None:
    if json_output:
        print_json(asdict(result))
        return
    say(f"{done} {result.target}: {updates} updates, {human_size(result.size_bytes)}.")


@click.command(
    "export-lora",
    cls=Verb,
    short_help="Write the LoRA adapter of a checkpoint as a directory that peft loads.",
    examples=(f"nxdt checkpoint export-lora {EXAMPLE_URI} my-adapter --base-model meta-llama/Llama-3.1-8B",),
)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--base-model", metavar="NAME", help="What adapter_config.json names as the base: a path or a name.")
@named_config
@trusted_keys
@as_json
def export_lora(
    source: str, target: str, base_model: str | None, config: str | None, trusted: tuple[str, ...], json_output: bool
) -> None:
    """Write the adapter that a LoRA run trained, and nothing of its base, for `PeftModel.from_pretrained`.

    The run's tokenizer and chat template are written next to it.
    SRC is a checkpoint.uri, whose newest complete step is used, or one step of it. DST is a directory that is empty
    or not there yet.
    """
    from nxdt_plugin_lora import saved_run

    exported = saved_run.export_lora(source, target, base_model=base_model, config=config, trusted=trusted)
    _report(exported, json_output, f"Exported {exported.source} to", exported.updates)
