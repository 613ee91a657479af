"""``nxdt data merge``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.verb import Verb, as_json, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nxdt_plugin_megatron_data.indexed_files import IndexedTokens, Provenance


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
    from nxdt_plugin_megatron_data.errors import InputInTheWay, OutputExists
    from nxdt_plugin_megatron_data.indexed_files import IndexedTokens, bin_path
    from nxdt_plugin_megatron_data.preprocess.command import checked_prefix

    prefix = checked_prefix(output)
    parts = [IndexedTokens(Path(each).absolute(), key="PREFIX") for each in prefixes]
    if any(part.prefix == prefix for part in parts):
        raise InputInTheWay(path=str(bin_path(prefix)))
    if bin_path(prefix).exists() and not overwrite:
        raise OutputExists(path=str(bin_path(prefix)))
    note = _common_note(parts)
    _write(parts, prefix, note)
    facts = {
        "prefix": str(prefix),
        "documents": sum(part.documents for part in parts),
        "tokens": sum(part.total_tokens() for part in parts),
    }
    if json_output:
        print_json(facts)
    else:
        click.echo(f"Wrote {prefix}.bin and .idx: {facts['tokens']:,} tokens in {facts['documents']:,} documents.")


def _common_note(parts: Sequence[IndexedTokens]) -> Provenance | None:
    """Return the note of all parts; None where one has none.

    Raises:
        PartsDiffer: they have other types of tokens, or other tokenizers made them.
        BadIndexFile: sequences of a part do not follow each other.
    """
    import numpy as np

    from nxdt_plugin_megatron_data.errors import BadIndexFile, PartsDiffer
    from nxdt_plugin_megatron_data.indexed_files import idx_path, read_provenance

    notes = [read_provenance(part.prefix) for part in parts]

    def made_by(part: IndexedTokens, note: Provenance | None) -> dict[str, Any]:
        kept = {} if note is None else {"tokenizer": note.fingerprint, "end-of-text token": note.eod_id}
        return {"type of tokens": part.dtype.name, **kept}

    first = made_by(parts[0], notes[0])
    for part, note in zip(parts, notes, strict=True):
        for aspect, found in made_by(part, note).items():
            if found != first.get(aspect, found):
                raise PartsDiffer(path=str(part.prefix), aspect=aspect, found=found, first=first[aspect])
        ends = np.cumsum(part.lengths, dtype=np.int64) * part.dtype.itemsize
        if part.modes is not None or (part.pointers[1:] != ends[:-1]).any() or (part.pointers[:1] != 0).any():
            reason = "its sequences do not follow each other without gaps, or it has modes"
            raise BadIndexFile(path=str(idx_path(part.prefix)), reason=reason)
    known = [note for note in notes if note is not None]
    if len(known) < len(notes):
        return None
    inputs = tuple(dict.fromkeys(path for note in known for path in note.inputs))
    return replace(known[0], inputs=inputs)


def _write(parts: Sequence[IndexedTokens], prefix: Path, note: Provenance | None) -> None:
    import numpy as np

    from nxdt_core.system.regular_files import replace_text, replacing
    from nxdt_plugin_megatron_data.indexed_files import bin_path, idx_path, provenance_path, write_index
    from nxdt_plugin_megatron_data.preprocess.run import write_errors_explained

    with write_errors_explained(prefix, lambda: 0):
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with replacing(bin_path(prefix)) as file:
            for part in parts:
                left = part.total_tokens()
                for tokens in part.all_tokens():
                    file.write(tokens[:left].tobytes())
                    left -= len(tokens[:left])
        before = np.cumsum([0, *map(len, parts)])
        borders = [part.borders[:-1] + start for part, start in zip(parts, before, strict=False)]
        lengths = np.concatenate([part.lengths for part in parts])
        write_index(idx_path(prefix), parts[0].dtype, lengths, np.concatenate([*borders, before[-1:]]))
        if note is not None:
            replace_text(provenance_path(prefix), note.text())
        else:
            provenance_path(prefix).unlink(missing_ok=True)
