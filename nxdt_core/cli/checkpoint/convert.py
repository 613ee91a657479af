"""``nxdt checkpoint`` export and import: checkpoints for other programs, and models that these have saved."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.checkpoint.store import EXAMPLE_URI, named_config, on_all_ranks, print_report, trusted_keys
from nxdt_core.cli.terminal import human_size
from nxdt_core.cli.verb import as_json, verb
from nxdt_core.config import hub

if TYPE_CHECKING:
    from nxdt_core.train.weights.export import Exported
    from nxdt_core.train.weights.importing import Imported

_UNITS = {"": 1, **{f"{prefix}B": 1000**n for n, prefix in enumerate(("", "K", "M", "G", "T"))}}
_UNITS |= {f"{prefix}IB": 1024**n for n, prefix in enumerate(("K", "M", "G", "T"), start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)")
_DTYPES = {"hf": ("float32", "bfloat16", "float16"), "gguf": ("float32", "float16", "q8_0")}


def size(value: str) -> int:
    """Return the number of bytes; the ``type`` of an option."""
    match = _SIZE.fullmatch(value.strip().upper())
    size_bytes = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size_bytes < 1:
        raise click.BadParameter(f"{value!r} is not a size; write it as 5GB, 800MB or 512MiB.")
    return size_bytes


@verb(
    f"nxdt checkpoint export {EXAMPLE_URI} my-model-hf",
    f"nxdt checkpoint export {EXAMPLE_URI}/step-00000040 my-model-hf --dtype bfloat16 --max-shard-size 2GB",
    f"nxdt checkpoint export {EXAMPLE_URI} my-model.gguf --format gguf --dtype q8_0",
    f"nxdt checkpoint export {EXAMPLE_URI} my-model-hf --push my-name/my-model --private",
)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--format", "format_", type=click.Choice(["hf", "gguf"]), default="hf", show_default=True, help="What to write."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "q8_0"]),
    help="Dtype of the weights in DST; without it they keep theirs, and GGUF has float16.",
)
@click.option(
    "--max-shard-size", "max_shard_bytes", type=size, default="5GB", show_default=True, help="Largest file of weights."
)
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Files to write at the same time."
)
@click.option("--push", metavar="OWNER/NAME", help="Upload DST to this repository of the Hugging Face hub, too.")
@click.option("--private", is_flag=True, help="Where --push makes the repository: only its owner sees it.")
@click.option(
    "--ema", "average", is_flag=True, help="Write the average of the weights (exp_manager.ema) instead of the weights."
)
@named_config
@trusted_keys
@as_json
@click.pass_context
def export(
    ctx: click.Context,
    /,
    source: str,
    target: str,
    format_: str,
    push: str | None,
    private: bool,
    json_output: bool,
    **options: Any,
) -> None:
    """Write the model of a checkpoint as a directory that transformers loads, or as a GGUF file.

    SRC is a checkpoint.uri, of which the newest committed step is taken, or one step of it. DST is a directory that is
    empty or not there yet, or the address of another store. Memory holds one file of weights for each worker. Under
    torchrun or srun the processes divide the files. The same command resumes an interrupted export.

    With --format gguf, DST is one file for llama.cpp and Ollama. It holds a Llama, a Mistral or a Mixtral with its
    tokenizer.

    --push makes the repository where there is none, and takes the token from HF_TOKEN. A run starts from it with
    checkpoint.resume_from=hf:OWNER/NAME.
    """
    from nxdt_core.train.weights.export import export_gguf, export_hf

    if push is not None and (format_ == "gguf" or "://" in target):
        raise click.UsageError("--push uploads a local directory of --format hf.")
    if push is not None:
        hub.create(push, private=private)  # a token that may not write is found before the export

    allowed = _DTYPES[format_]
    if options["dtype"] not in (None, *allowed):
        raise click.BadParameter(f"'{format_}' has {', '.join(allowed)}.", param_hint="--dtype")

    def report(exported: Exported) -> None:
        if push is not None:
            pushed = hub.push(push, target, f"Export {exported.source.rpartition('/')[2]} of nxdt")
            exported = replace(exported, pushed=pushed)
        size = human_size(exported.size_bytes)
        pushed = "" if exported.pushed is None else f" Pushed to {exported.pushed}."
        print_report(
            exported, f"Exported {exported.source} to {exported.target}: {size} of weights.{pushed}", json_output
        )

    if format_ == "gguf":
        taken = {name: options[name] for name in ("average", "config", "trusted")}
        report(export_gguf(source, target, dtype=options["dtype"] or "float16", **taken))
        return
    ctx.exit(on_all_ranks(lambda ranks: export_hf(source, target, ranks=ranks, **options), report))


@verb(
    "nxdt checkpoint import Llama-3.1-8B checkpoints/llama-3.1-8b",
    "nxdt checkpoint import Llama-3.1-8B checkpoints/llama-3.1-8b --config my_run.yaml",
    "nxdt checkpoint import a--step=100.ckpt checkpoints/a --config my_run.yaml --weights-only",
    name="import",
)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--config", metavar="CONFIG", help="YAML file or recipe:NAME of the model, instead of the one in SRC.")
@click.option("--format", help="Format of SRC, instead of a detected one.")
@click.option("--weights-only", is_flag=True, help="Leave out the optimizer's state, also where it is not whole.")
@as_json
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_context
def import_(ctx: click.Context, /, source: str, target: str, json_output: bool, **options: Any) -> None:
    """Make a checkpoint of a model that another program has saved, such as a Hugging Face directory.

    SRC is a directory, or hf:owner/name of the Hugging Face hub. DST is what checkpoint.uri says: a directory, or an
    address of an installed store; it must hold no checkpoint yet. A run starts from the weights with
    checkpoint.resume_from=DST checkpoint.weight_init_only=true. Where SRC has optimizer state that is not whole,
    nothing is imported unless --weights-only is given. Memory holds one tensor at a time. Under torchrun or srun the
    processes divide the tensors.
    """
    from nxdt_core.train.weights.importing import import_checkpoint

    def report(imported: Imported) -> None:
        what = f"{imported.tensors} tensors, {human_size(imported.size_bytes)}, a model of {imported.model!r}"
        sentence = f"Imported {imported.source} ({imported.format}) to {imported.target}: {what}."
        print_report(imported, sentence, json_output)

    ctx.exit(on_all_ranks(lambda ranks: import_checkpoint(source, target, ranks=ranks, **options), report))
