"""``nxdt data inspect``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.terminal import human_size, print_facts
from nxdt_core.cli.verb import Verb, as_json, print_json

if TYPE_CHECKING:
    from nxdt_plugin_megatron_data.indexed_files import IndexedTokens


_QUANTILES = (0, 25, 50, 75, 95, 100)


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
    from nxdt_plugin_megatron_data.indexed_files import IndexedTokens

    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    found = _facts(IndexedTokens(prefix.absolute(), key="PREFIX"))
    if json_output:
        print_json(found)
        return
    lengths, note = found["lengths"], found["made_by"]
    facts = [
        ("tokens", f"{found['tokens']:,} ({found['dtype']}, {human_size(found['bin_bytes'])})"),
        ("documents", f"{found['documents']:,} in {found['sequences']:,} sequences"),
        ("lengths", " · ".join(f"{name} {value:,}" for name, value in lengths.items())),
        ("ids", f"{found['smallest_id']:,} to {found['largest_id']:,}" if found["tokens"] else "none"),
        ("tokenizer", "unknown: there is no note next to the files" if note is None else _made_by(note)),
    ]
    if found["unused_bytes"]:
        facts.append(("unused", f"{found['unused_bytes']:,} bytes of the .bin that no sequence names"))
    print_facts(facts)


def _facts(source: IndexedTokens) -> dict[str, Any]:
    import numpy as np

    from nxdt_plugin_megatron_data.indexed_files import bin_path, read_provenance

    names = ("min", "p25", "median", "p75", "p95", "max")
    lengths = np.percentile(source.lengths, _QUANTILES, method="nearest").tolist() if len(source) else [0] * len(names)
    note = read_provenance(source.prefix)
    tokens = source.total_tokens()
    ids = [(int(part.min()), int(part.max())) for part in source.all_tokens()]
    bin_bytes = bin_path(source.prefix).stat().st_size
    return {
        "prefix": str(source.prefix),
        "dtype": source.dtype.name,
        "tokens": tokens,
        "documents": source.documents,
        "sequences": len(source),
        "bin_bytes": bin_bytes,
        "unused_bytes": max(0, bin_bytes - tokens * source.dtype.itemsize),
        "lengths": dict(zip(names, map(int, lengths), strict=True)),
        "smallest_id": min(low for low, _ in ids) if ids else None,
        "largest_id": max(high for _, high in ids) if ids else None,
        "multimodal": source.modes is not None,
        "made_by": None if note is None else asdict(note),
    }


def _made_by(note: dict[str, Any]) -> str:
    end = "no token" if note["eod_id"] is None else f"token {note['eod_id']}"
    return f"{note['tokenizer']} (vocabulary {note['vocab_size']:,}); {end} behind each document"
