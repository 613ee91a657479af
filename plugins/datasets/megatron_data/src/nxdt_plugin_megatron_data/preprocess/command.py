"""``nxdt data preprocess``."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.verb import Verb, as_json, print_json, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nxdt_plugin_megatron_data.preprocess.progress import Counts
    from nxdt_plugin_megatron_data.preprocess.run import Job, Outcome


@click.command(
    cls=Verb,
    short_help="Tokenise JSONL or text into Megatron's .bin/.idx files.",
    examples=(
        "nxdt data preprocess --input corpus.jsonl --output-prefix data/corpus --tokenizer byte",
        "nxdt data preprocess --input a.jsonl.gz b.jsonl.zst --output-prefix data/web --tokenizer tokenizer.json",
        "nxdt data preprocess --input books/one.txt --output-prefix data/books --tokenizer byte --separator '\\n\\n'",
        "nxdt data preprocess --input c.jsonl --output-prefix c --tokenizer gpt2 "
        "--tokenizer-option eos_token='<|endoftext|>' --workers 8",
        "nxdt data preprocess --input corpus.jsonl --output-prefix data/part-1 --tokenizer byte --shard 1/4",
        "nxdt data preprocess --input c.jsonl --output-prefix c --tokenizer megatron "
        "--tokenizer-option vocab_file=vocab.json --tokenizer-option merge_file=merges.txt",
    ),
)
@click.option("--input", "inputs", multiple=True, required=True, metavar="FILE...", help="Files, in this order.")
@click.argument("more", nargs=-1, metavar="")
@click.option(
    "--output-prefix",
    "prefix",
    required=True,
    help="Path of the files to make, without .bin and .idx.",
)
@click.option(
    "--tokenizer",
    required=True,
    help="'byte', a tokenizer.json, a directory, a SentencePiece model, Llama 3's tokenizer.model, or a hub name; "
    "'megatron' with the options vocab_file=FILE and merge_file=FILE for GPT-2's vocabulary and merges.",
)
@click.option(
    "--tokenizer-option", multiple=True, metavar="KEY=VALUE", help="A key of data.tokenizer; may be given repeatedly."
)
@click.option("--workers", type=click.IntRange(min=1), help="Tokenising processes. Default: one per core.")
@click.option("--text-key", default="text", show_default=True, help="Key of the text in each JSON object.")
@click.option(
    "--separator", help="Separator between documents of text files, such as '\\n\\n'. Default: a file is a document."
)
@click.option(
    "--append-eod/--no-append-eod", default=True, show_default=True, help="Put the end-of-text token behind documents."
)
@click.option(
    "--max-bad-share",
    type=click.FloatRange(0, 1),
    default=0.01,
    show_default=True,
    help="Stop where more of the records than this hold no text.",
)
@click.option(
    "--save-every",
    type=click.FloatRange(min=0),
    default=10,
    show_default=True,
    help="Seconds of work that a kill may cost.",
)
@click.option("--shard", metavar="I/N", help="Write part I of N, counted from 1, for `nxdt data merge` to join.")
@click.option("--overwrite", is_flag=True, help="Start again, and replace any files at the prefix.")
@as_json
def preprocess(
    inputs: Sequence[str],
    more: Sequence[str],
    prefix: str,
    tokenizer: str,
    tokenizer_option: Sequence[str],
    workers: int | None,
    text_key: str,
    separator: str | None,
    append_eod: bool,
    max_bad_share: float,
    save_every: float,
    shard: str | None,
    overwrite: bool,
    json_output: bool,
) -> None:
    """Tokenise files into PREFIX.bin and PREFIX.idx, as Megatron-Core writes them.

    A name that ends in .jsonl, .ndjson or .json has a JSON object per line, every other is text; .gz and .zst behind
    it are decompressed. Records without text are counted, and the first ones named. A killed run resumes
    where it stopped when the same command is given again.
    """
    from nxdt_core.data.files.paths import expand
    from nxdt_plugin_megatron_data.preprocess.records import TokenizationOptions
    from nxdt_plugin_megatron_data.preprocess.run import Job
    from nxdt_plugin_megatron_data.preprocess.run import preprocess as run
    from nxdt_plugin_megatron_data.preprocess.tokenizers import find_tokenizer

    job = Job(
        files=tuple(expand((*inputs, *more), "--input")),
        prefix=checked_prefix(prefix),
        tokenizer=find_tokenizer(tokenizer, tokenizer_option),
        recipe=TokenizationOptions(
            text_key=text_key,
            separator=_unescaped(separator) if separator else None,
            append_eod=append_eod,
        ),
        workers=workers or _cores(),
        max_bad_share=max_bad_share,
        save_every_s=save_every,
        overwrite=overwrite,
        shard=_shard(shard) if shard else (1, 1),
    )
    with _bar(job.files) as watch:
        outcome = run(job, watch)
    if json_output:
        print_json(_facts(job, outcome))
    else:
        _print_outcome(job, outcome)


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise click.BadParameter(f"{text!r} is not a part such as 1/4, the first of four", param_hint="--shard")
    return int(number), int(count)


def checked_prefix(text: str) -> Path:
    """Return the path of the files to write.

    Raises:
        BadPrefix: it is a directory, or ends in a suffix that is put behind it.
    """
    from nxdt_plugin_megatron_data.errors import BadPrefix

    path = Path(text)
    if text.endswith(os.sep) or path.name in ("", ".."):
        raise BadPrefix(prefix=text, reason="is a directory, not the beginning of names")
    if path.suffix in (".bin", ".idx"):
        raise BadPrefix(prefix=text, reason=f"ends in {path.suffix}, which is put behind it")
    return path.absolute()


def _unescaped(text: str) -> str:
    """``text`` with what Python's escapes stand for."""
    try:
        return text.encode("ascii", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{text!r} {error.reason}", param_hint="--separator") from error


@contextmanager
def _bar(files: Sequence[Path]) -> Iterator[Callable[[int, Counts], None]]:
    """A bar of the files' bytes with the tokens per second; nothing where no terminal reads it."""
    from tqdm import tqdm

    size_bytes = sum(path.stat().st_size for path in files)
    hidden = not sys.stderr.isatty()
    with tqdm(total=size_bytes, unit="B", unit_scale=True, file=sys.stderr, disable=hidden, leave=False) as bar:
        start: list[int] = []

        def watch(disk_bytes: int, counts: Counts) -> None:
            if hidden:
                return
            start[:] = start or [counts.tokens]
            seconds = bar.format_dict["elapsed"] or 1
            bar.set_postfix_str(
                f"{(counts.tokens - start[0]) / seconds:,.0f} tokens/s, {counts.bad} bad", refresh=False
            )
            bar.update(disk_bytes - bar.n)

        yield watch


def _facts(job: Job, outcome: Outcome) -> dict[str, Any]:
    counts = outcome.counts
    return {
        "prefix": str(job.prefix),
        "documents": counts.documents,
        "tokens": counts.tokens,
        "records": counts.records,
        "empty": counts.empty,
        "bad": counts.bad,
        "first_bad": counts.first_bad,
        "tokens_before": outcome.tokens_before,
        "seconds": round(outcome.seconds, 3),
        "tokens_per_second": round(_rate(outcome)),
    }


def _print_outcome(job: Job, outcome: Outcome) -> None:
    counts = outcome.counts
    if outcome.tokens_before:
        click.echo(f"Resumed after {outcome.tokens_before:,} tokens of an unfinished run.")
    click.echo(
        f"Wrote {job.prefix}.bin and .idx: {counts.tokens:,} tokens in {counts.documents:,} documents, "
        f"{_rate(outcome):,.0f} tokens/s."
    )
    if counts.empty:
        click.echo(f"{counts.empty:,} of {counts.records:,} records are empty and are left out.")
    if counts.bad:
        click.echo(f"{counts.bad:,} of {counts.records:,} records hold no text and are left out; the first of them:")
        for fault in counts.first_bad:
            say(f"  {fault}")


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _rate(outcome: Outcome) -> float:
    return (outcome.counts.tokens - outcome.tokens_before) / max(outcome.seconds, 1e-9)
