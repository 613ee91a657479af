"""``nxdt data preprocess``, ``merge`` and ``inspect``."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.terminal import human_size, print_facts
from nxdt_core.cli.verb import Verb, as_json, print_json, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nxdt_plugin_megatron_data.preprocess import Counts

_QUANTILES = {"min": 0, "p25": 25, "median": 50, "p75": 75, "p95": 95, "max": 100}


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
    from nxdt_plugin_megatron_data.encoding import TokenizationOptions, find_tokenizer
    from nxdt_plugin_megatron_data.preprocess import Job
    from nxdt_plugin_megatron_data.preprocess import preprocess as run

    part = (1, 1)
    if shard:
        number, _, count = shard.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise click.BadParameter(f"{shard!r} is not a part such as 1/4, the first of four", param_hint="--shard")
        part = int(number), int(count)
    if separator:  # with what Python's escapes stand for
        try:
            separator = separator.encode("ascii", "backslashreplace").decode("unicode_escape")
        except UnicodeDecodeError as error:
            raise click.BadParameter(f"{separator!r} {error.reason}", param_hint="--separator") from error
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    job = Job(
        files=tuple(expand((*inputs, *more), "--input")),
        prefix=checked_prefix(prefix),
        tokenizer=find_tokenizer(tokenizer, tokenizer_option),
        recipe=TokenizationOptions(text_key=text_key, separator=separator or None, append_eod=append_eod),
        workers=workers or cores,
        max_bad_share=max_bad_share,
        save_every_s=save_every,
        overwrite=overwrite,
        shard=part,
    )
    began = time.monotonic()
    with _bar(job.files) as watch:
        counts, tokens_before = run(job, watch)
    seconds = time.monotonic() - began
    rate = (counts.tokens - tokens_before) / max(seconds, 1e-9)
    if json_output:
        facts = asdict(counts) | {"tokens_before": tokens_before, "seconds": round(seconds, 3)}
        print_json({"prefix": str(job.prefix), **facts, "tokens_per_second": round(rate)})
        return
    if tokens_before:
        click.echo(f"Resumed after {tokens_before:,} tokens of an unfinished run.")
    click.echo(
        f"Wrote {job.prefix}.bin and .idx: {counts.tokens:,} tokens in {counts.documents:,} documents, "
        f"{rate:,.0f} tokens/s."
    )
    if counts.empty:
        click.echo(f"{counts.empty:,} of {counts.records:,} records are empty and are left out.")
    if counts.bad:
        click.echo(f"{counts.bad:,} of {counts.records:,} records hold no text and are left out; the first of them:")
        for fault in counts.first_bad:
            say(f"  {fault}")


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


@click.command(
    cls=Verb,
    short_help="Join pairs of .bin/.idx files into one.",
    examples=("nxdt data merge data/part-1 data/part-2 --output-prefix data/corpus",),
)
@click.argument("prefixes", nargs=-1, required=True, metavar="PREFIX...")
@click.option("--output-prefix", "output", required=True, help="Path of the files to make, without .bin and .idx.")
@click.option("--overwrite", is_flag=True, help="Replace any files at the prefix.")
@as_json
def merge(prefixes: Sequence[str], output: str, overwrite: bool, json_output: bool) -> None:
    """Join the documents of PREFIX... in this order.

    The parts of `nxdt data preprocess --shard`, in the order of their numbers, give the files that it writes without
    --shard.
    """
    import numpy as np

    from nxdt_core.system.regular_files import replace_text, replacing
    from nxdt_plugin_megatron_data import indexed_files as files
    from nxdt_plugin_megatron_data.errors import BadIndexFile, InputInTheWay, OutputExists, PartsDiffer
    from nxdt_plugin_megatron_data.preprocess import write_errors_explained

    prefix = checked_prefix(output)
    parts = [files.IndexedTokens(Path(part).absolute(), key="PREFIX") for part in prefixes]
    if any(part.prefix == prefix for part in parts):
        raise InputInTheWay(path=str(files.bin_path(prefix)))
    if files.bin_path(prefix).exists() and not overwrite:
        raise OutputExists(path=str(files.bin_path(prefix)))
    notes, first = [files.read_provenance(part.prefix) for part in parts], dict[str, Any]()
    for number, (part, note) in enumerate(zip(parts, notes, strict=True)):
        made_by = {} if note is None else {"tokenizer": note.fingerprint, "end-of-text token": note.eod_id}
        made_by = {"type of tokens": part.dtype.name, **made_by}
        first = first if number else made_by
        for aspect, value in made_by.items():
            if value != first.get(aspect, value):
                raise PartsDiffer(path=str(part.prefix), aspect=aspect, found=value, first=first[aspect])
        ends = np.cumsum(part.lengths, dtype=np.int64) * part.dtype.itemsize
        if part.modes is not None or (part.pointers[1:] != ends[:-1]).any() or (part.pointers[:1] != 0).any():
            reason = "its sequences do not follow each other without gaps, or it has modes"
            raise BadIndexFile(path=str(files.idx_path(part.prefix)), reason=reason)
    with write_errors_explained(prefix, lambda: 0):
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with replacing(files.bin_path(prefix)) as file:
            for part in parts:
                left = part.total_tokens()
                for tokens in part.all_tokens():
                    file.write(tokens[:left].tobytes())
                    left -= len(tokens[:left])
        before = np.cumsum([0, *map(len, parts)])
        borders = [part.borders[:-1] + start for part, start in zip(parts, before, strict=False)]
        lengths = np.concatenate([part.lengths for part in parts])
        files.write_index(files.idx_path(prefix), parts[0].dtype, lengths, np.concatenate([*borders, before[-1:]]))
        present = [note for note in notes if note is not None]
        if len(present) == len(notes):
            inputs = tuple(dict.fromkeys(path for note in present for path in note.inputs))
            replace_text(files.provenance_path(prefix), replace(present[0], inputs=inputs).text())
        else:
            files.provenance_path(prefix).unlink(missing_ok=True)
    documents, count = sum(part.documents for part in parts), sum(part.total_tokens() for part in parts)
    if json_output:
        print_json({"prefix": str(prefix), "documents": documents, "tokens": count})
    else:
        click.echo(f"Wrote {prefix}.bin and .idx: {count:,} tokens in {documents:,} documents.")


@click.command(
    cls=Verb,
    short_help="Check a pair of .bin/.idx files and show its contents.",
    examples=("nxdt data inspect data/corpus", "nxdt data inspect data/corpus --json"),
)
@click.argument("prefix", type=click.Path(path_type=Path))
@as_json
def inspect(prefix: Path, json_output: bool) -> None:
    """Check PREFIX.bin and PREFIX.idx, and show what they contain and which program wrote them.

    The whole index is checked, and every token is read once to find the largest.
    """
    import numpy as np

    from nxdt_plugin_megatron_data.indexed_files import IndexedTokens, bin_path, read_provenance

    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    source = IndexedTokens(prefix.absolute(), key="PREFIX")
    shares = [*_QUANTILES.values()]
    values = np.percentile(source.lengths, shares, method="nearest").tolist() if len(source) else [0] * len(shares)
    lengths = dict(zip(_QUANTILES, map(int, values), strict=True))
    note, tokens = read_provenance(source.prefix), source.total_tokens()
    ids = [(int(part.min()), int(part.max())) for part in source.all_tokens()]
    smallest, largest = (min(low for low, _ in ids), max(high for _, high in ids)) if ids else (None, None)
    bin_bytes = bin_path(source.prefix).stat().st_size
    unused_bytes = max(0, bin_bytes - tokens * source.dtype.itemsize)
    if json_output:
        print_json(
            {
                "prefix": str(source.prefix),
                "dtype": source.dtype.name,
                "tokens": tokens,
                "documents": source.documents,
                "sequences": len(source),
                "bin_bytes": bin_bytes,
                "unused_bytes": unused_bytes,
                "lengths": lengths,
                "smallest_id": smallest,
                "largest_id": largest,
                "multimodal": source.modes is not None,
                "made_by": None if note is None else asdict(note),
            }
        )
        return
    made_by = "unknown: there is no note next to the files"
    if note is not None:
        end = "no token" if note.eod_id is None else f"token {note.eod_id}"
        made_by = f"{note.tokenizer} (vocabulary {note.vocab_size:,}); {end} behind each document"
    facts = [
        ("tokens", f"{tokens:,} ({source.dtype.name}, {human_size(bin_bytes)})"),
        ("documents", f"{source.documents:,} in {len(source):,} sequences"),
        ("lengths", " · ".join(f"{name} {value:,}" for name, value in lengths.items())),
        ("ids", f"{smallest:,} to {largest:,}" if tokens else "none"),
        ("tokenizer", made_by),
    ]
    if unused_bytes:
        facts.append(("unused", f"{unused_bytes:,} bytes of the .bin that no sequence names"))
    print_facts(facts)
