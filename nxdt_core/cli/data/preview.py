"""``nxdt data preview``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.verb import Verb, as_json, config_arguments, print_json, print_note

if TYPE_CHECKING:
    from nxdt_core.data.preview import Preview, ShownDocument
    from nxdt_core.protocols.dataset import DataReport, SplitName, TokenCount

__all__ = ["preview"]


@click.command(
    cls=Verb,
    short_help="Show what a run would train on, token by token.",
    examples=(
        "nxdt data preview recipe:llama-tiny",
        "nxdt data preview my_run.yaml -n 1 --ids",
        "nxdt data preview my_run.yaml data.train_turns=last --split validation",
        "nxdt data preview my_run.yaml --all --json",
    ),
)
@config_arguments
@click.option("-n", "--samples", type=click.IntRange(min=0), default=3, show_default=True, help="Samples to show.")
@click.option(
    "--split",
    type=click.Choice(["train", "validation", "test"]),
    default="train",
    show_default=True,
    help="Split of the data to show.",
)
@click.option("--all", "whole", is_flag=True, help="Read all records of a large dataset, not only the first 1,000.")
@click.option("--ids", is_flag=True, help="Show the id of each token after it.")
@as_json
def preview(
    source: str, overrides: tuple[str, ...], samples: int, split: SplitName, whole: bool, ids: bool, json_output: bool
) -> None:
    """Show the first samples of a run as training sees them, and mark the text that the loss is computed on.

    CONFIG and KEY=VALUE are those of `nxdt train`. In a terminal, trained text is green; elsewhere it is enclosed
    in ⟦ and ⟧. Counts follow: by role and turn where the data have them, lengths, what was truncated or left out,
    and how much of the samples is filled. Of conversations and preference pairs the first 1,000 records are read,
    unless --all is given.
    """
    from nxdt_core.config import load
    from nxdt_core.config.placeholders import require_set

    config = load(source, overrides)
    require_set(config)
    for note in config.notes:
        print_note(note)

    from nxdt_core.train.data import preview as look  # imports torch: only a right configuration pays for it

    found = look(config, split, samples, whole=whole)
    if json_output:
        content = {"sets": _each(found)} if isinstance(found, dict) else _json(found)
        print_json({"source": source, "split": split, "seq_length": config.run.data.seq_length, **content})
        return
    from nxdt_core.cli.data.preview_report import print_preview

    title = f"{split} samples of {source}"
    for name, each in found.items() if isinstance(found, dict) else [("", found)]:
        print_preview(each, title=f"{title}: {name}" if name else title, ids=ids)


def _each(found: dict[str, Preview]) -> dict[str, Any]:
    return {name: _json(each) for name, each in found.items()}


def _json(found: Preview) -> dict[str, Any]:
    return {
        "samples": found.samples,
        "report": {"samples": found.counted, **_report(found.report)},
        "shown": [
            {
                "index": sample.index,
                "row": sample.row,
                "padding": sample.padding,
                "documents": [_document(document) for document in sample.documents],
            }
            for sample in found.shown
        ],
    }


def _document(document: ShownDocument) -> dict[str, Any]:
    parts = [{"text": part.text, "trained": part.trained, "ids": part.ids} for part in document.parts]
    return {**asdict(document.count), "parts": parts}


def _report(report: DataReport) -> dict[str, Any]:
    from nxdt_core.cli.data.preview_report import length_summary

    return {
        "records": report.records,
        **_count(report.tokens),
        "lengths": length_summary(report),
        "by_role": {role: _count(count) for role, count in report.by_role.items()},
        "by_turn": [_count(count) for count in report.by_turn],
        "truncated": report.truncated,
        "left_out": dict(report.left_out),
        "bad": list(report.bad),
        "of_records": report.of_records,
        "unused": dict(report.unused),
        "efficiency": report.efficiency,
    }


def _count(count: TokenCount) -> dict[str, Any]:
    return {**asdict(count), "share_trained": count.trained / count.tokens if count.tokens else 0.0}
