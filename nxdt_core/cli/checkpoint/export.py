"""``nxdt checkpoint export``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

import click

from nxdt_core.cli.checkpoint.store import EXAMPLE_URI, named_config, on_all_ranks, print_report, trusted_keys
from nxdt_core.cli.terminal import human_size
from nxdt_core.cli.verb import Verb, as_json

if TYPE_CHECKING:
    from nxdt_core.hf.gguf import GgufDtype
    from nxdt_core.train.weights.export import ExportDtype, Exported


_UNITS = {"": 1, **{f"{prefix}B": 1000**n for n, prefix in enumerate(("", "K", "M", "G", "T"))}}
_UNITS |= {f"{prefix}IB": 1024**n for n, prefix in enumerate(("K", "M", "G", "T"), start=1)}
_DTYPES = {"hf": ("float32", "bfloat16", "float16"), "gguf": ("float32", "float16", "q8_0")}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)")


def size(value: str) -> int:
    """Return the number of bytes; the ``type`` of an option."""
    match = _SIZE.fullmatch(value.strip().upper())
    found = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if found < 1:
        raise click.BadParameter(f"{value!r} is not a size; write it as 5GB, 800MB or 512MiB.")
    return found


@click.command(
    cls=Verb,
    examples=(
        f"nxdt checkpoint export {EXAMPLE_URI} my-model-hf",
        f"nxdt checkpoint export {EXAMPLE_URI}/step-00000040 my-model-hf --dtype bfloat16 --max-shard-size 2GB",
        f"nxdt checkpoint export {EXAMPLE_URI} my-model.gguf --format gguf --dtype q8_0",
    ),
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
@click.option("--max-shard-size", type=size, default="5GB", show_default=True, help="Largest file of weights.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Files to write at the same time."
)
@click.option("--ema", is_flag=True, help="Write the average of the weights (exp_manager.ema) instead of the weights.")
@named_config
@trusted_keys
@as_json
@click.pass_context
def export(
    ctx: click.Context,
    source: str,
    target: str,
    format_: str,
    dtype: ExportDtype | GgufDtype | None,
    max_shard_size: int,
    workers: int,
    ema: bool,
    config: str | None,
    trusted: tuple[str, ...],
    json_output: bool,
) -> None:
    """Write the model of a checkpoint as a directory that transformers loads, or as a GGUF file.

    SRC is a checkpoint.uri, of which the newest committed step is taken, or one step of it. DST is a directory that is
    empty or not there yet, or the address of another store. Memory holds one file of weights for each worker. Under
    torchrun or srun the processes divide the files. The same command resumes an interrupted export.

    With --format gguf, DST is one file for llama.cpp and Ollama. It holds a Llama, a Mistral or a Mixtral with its
    tokenizer.
    """
    from nxdt_core.train.weights.export import export_gguf, export_hf

    allowed = _DTYPES[format_]
    if dtype is not None and dtype not in allowed:
        raise click.BadParameter(f"'{format_}' has {', '.join(allowed)}.", param_hint="--dtype")
    if format_ == "gguf":
        gguf_dtype = cast("GgufDtype", dtype or "float16")
        _report(export_gguf(source, target, dtype=gguf_dtype, average=ema, config=config, trusted=trusted), json_output)
        return
    ctx.exit(
        on_all_ranks(
            lambda ranks: export_hf(
                source,
                target,
                dtype=cast("ExportDtype | None", dtype),
                max_shard_bytes=max_shard_size,
                workers=workers,
                average=ema,
                config=config,
                trusted=trusted,
                ranks=ranks,
            ),
            lambda exported: _report(exported, json_output),
        )
    )


def _report(exported: Exported, json_output: bool) -> None:
    size = human_size(exported.size_bytes)
    print_report(exported, f"Exported {exported.source} to {exported.target}: {size} of weights.", json_output)
