"""``nxdt data``: preview the samples of a run. Plugins add verbs that prepare data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from typing import Any

import click

from nxdt_core.cli.config import require_set
from nxdt_core.cli.terminal import percent, print_facts, print_table
from nxdt_core.cli.verb import SuggestingGroup, as_json, attributes, config_arguments, print_json, print_note
from nxdt_core.config import load
from nxdt_core.data.files.records import count_records, describe_unused
from nxdt_core.data.preview import Preview, ShownSample
from nxdt_core.protocols.dataset import DataReport, SplitName, TokenCount
from nxdt_core.system.visible_text import visible

_BAD = 20
"""Bad records that are listed."""
_TURNS = 8
"""Turns that the table has rows for; later ones share the last."""


@click.group(
    cls=SuggestingGroup,
    examples=("nxdt data preview recipe:llama-tiny", "nxdt data preview my_run.yaml -n 1 --ids"),
)
def data() -> None:
    """Preview and prepare training data."""


@data.command(
    "preview",
    short_help="Show what a run would train on, token by token.",
    examples=(
        "nxdt data preview recipe:llama-tiny",
        "nxdt data preview my_run.yaml -n 1 --ids",
        "nxdt data preview my_run.yaml data.train_turns=last --split validation",
        "nxdt data preview my_run.yaml --all --json",
    ),
)
@config_arguments
@click.option(
    "-n",
    "--samples",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Documents of the first samples to show; with --json, whole samples.",
)
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
    """Show the first documents of a run as training sees them, and mark the text that the loss is computed on.

    CONFIG and KEY=VALUE are those of `nxdt train`. A packed sample has several documents, such as conversations. In
    a terminal, trained text is green; elsewhere it is enclosed in ⟦ and ⟧. Counts follow: by role and turn where the
    data have them, lengths, what was truncated or left out, and how much of the samples is filled. Of conversations
    and preference pairs the first 1,000 records are read, unless --all is given.
    """
    config = load(source, overrides)
    require_set(config)
    for note in config.notes:
        print_note(note)

    from nxdt_core.train.data import preview as look  # imports torch: only a right configuration pays for it

    previews = look(config, split, samples, whole=whole)
    if json_output:
        if isinstance(previews, dict):
            content: dict[str, Any] = {"sets": {name: _json(one) for name, one in previews.items()}}
        else:
            content = _json(previews)
        print_json({"source": source, "split": split, "seq_length": config.run.data.seq_length, **content})
        return

    title = f"{split} samples of {source}"
    for name, one in previews.items() if isinstance(previews, dict) else [("", previews)]:
        print_preview(one, samples, title=f"{title}: {name}" if name else title, ids=ids)


def _json(preview: Preview) -> dict[str, Any]:
    report = preview.report
    shown = []
    for sample in preview.shown:
        documents = [
            {**asdict(document.count), "parts": [attributes(part, "text", "trained", "ids") for part in document.parts]}
            for document in sample.documents
        ]
        shown.append({**attributes(sample, "index", "row", "padding"), "documents": documents})
    return {
        "samples": preview.samples,
        "report": {
            "samples": preview.counted,
            "records": report.records,
            **_count(report.tokens),
            "lengths": length_summary(report),
            "by_role": {role: _count(count) for role, count in report.by_role.items()},
            "by_turn": [_count(count) for count in report.by_turn],
            **attributes(report, "truncated", "left_out", "bad", "of_records", "unused", "efficiency"),
        },
        "shown": shown,
    }


def _count(count: TokenCount) -> dict[str, Any]:
    return {**asdict(count), "share_trained": count.trained / count.tokens if count.tokens else 0.0}


def print_preview(preview: Preview, documents: int, *, title: str, ids: bool) -> None:
    """Print the first ``documents`` of one dataset, with the id of each token where ``ids`` is true, then counts.

    The rows of a sample, such as a chosen and a rejected answer, count once. ``title`` says what the samples are from.
    """
    wanted = click.get_current_context().color  # by the same rule as click
    coloured = sys.stdout.isatty() if wanted is None else wanted
    printed = 0
    for _, group in groupby(preview.shown, attrgetter("index")):
        if printed >= documents:
            break
        sample = list(group)
        for row in sample:
            _print_sample(row, printed, documents, ids, coloured)
        printed += max(len(row.documents) for row in sample)
    print_facts(list(_facts(preview, title)))
    counts = [*preview.report.by_role.items()]
    turns, later = preview.report.by_turn[: _TURNS - 1], preview.report.by_turn[_TURNS - 1 :]
    counts += [(f"assistant's turn {number}", count) for number, count in enumerate(turns, start=1)]
    if later:
        name = str(_TURNS) if len(later) == 1 else f"{_TURNS} and later"
        total = TokenCount(tokens=sum(count.tokens for count in later), trained=sum(count.trained for count in later))
        counts.append((f"assistant's turn {name}", total))
    if counts:
        click.echo()
        rows = [
            (name, f"{count.tokens:,}", f"{count.trained:,}", percent(count.trained / max(count.tokens, 1)))
            for name, count in counts
        ]
        print_table(("OF", "TOKENS", "TRAINED", "SHARE"), rows, right=("TOKENS", "TRAINED"))


def length_summary(report: DataReport) -> dict[str, float]:
    """Return the tokens of the records: least, median, mean, 95 % have at most, most. Empty without records."""
    if not len(report.lengths):
        return {}
    ordered = sorted(report.lengths.tolist())
    least, median, most_of, most = (ordered[int(share * (len(ordered) - 1))] for share in (0, 0.5, 0.95, 1))
    return {"min": least, "median": median, "mean": float(report.lengths.mean()), "p95": most_of, "max": most}


def _print_sample(sample: ShownSample, printed: int, most: int, ids: bool, coloured: bool) -> None:
    """Print documents until ``most`` are printed, of which ``printed`` are those of earlier samples."""
    filled = sample.length - sample.padding
    row = f", row {sample.row}" if sample.row else ""
    end = printed + len(sample.documents)
    by = f" by {len(sample.documents)} documents" if len(sample.documents) > 1 else ""
    click.secho(f"sample {sample.index}{row}: {filled:,} of {sample.length:,} positions filled{by}", bold=True)
    for number, document in enumerate(sample.documents[: most - printed]):
        count = document.count
        click.secho(f"── document {number}: {count.tokens:,} tokens, {count.trained:,} trained ──", bold=True)
        for part in document.parts:
            marks = ("⟦", "⟧") if part.trained and not coloured else ("", "")
            texts = [(part.text, "")]
            if ids or not part.text:
                texts = [(text, f"·{id_}·") for text, id_ in zip(part.texts, part.ids, strict=True)]
            click.echo(marks[0], nl=False)
            for text, id_ in texts:
                text = visible(text)
                if coloured and part.trained:  # line ends show, since they are tokens with a loss
                    text = click.style(text.replace("\n", "↵\n"), fg="green", underline=True)
                click.echo(text + (click.style(id_, fg="magenta") if coloured and id_ else id_), nl=False)
            click.echo(marks[1], nl=False)
        click.echo()
    if end > most:
        click.secho(f"── {end - most} more in this sample: -n {end} ──", bold=True)
    click.echo()


def _facts(preview: Preview, title: str) -> Iterator[tuple[str, str]]:
    report = preview.report
    whole = preview.samples is not None and report.of_records is None
    yield "data", f"{title}, {preview.samples:,} in all" if whole else title
    if preview.counted is not None:
        yield "counted", f"the first {preview.counted:,} samples"
    of = f", made of the first records of {report.of_records:,}; --all reads all" if report.of_records else ""
    yield "records", f"{report.records:,}{of}"
    share = report.tokens.trained / report.tokens.tokens if report.tokens.tokens else 0.0
    yield "tokens", f"{report.tokens.tokens:,}, of which {report.tokens.trained:,} ({percent(share)}) are trained"
    if lengths := length_summary(report):
        yield (
            "lengths",
            f"{lengths['min']:,.0f} to {lengths['max']:,.0f}, median {lengths['median']:,.0f}, "
            f"95 % at most {lengths['p95']:,.0f}",
        )
    if report.truncated:
        yield "truncated", count_records(report.truncated)
    for reason, count in report.left_out.items():
        yield "left out", f"{count_records(count)}: {reason}"
    for reason in report.bad[:_BAD]:
        yield "", reason
    if report.unused:
        yield "unused", describe_unused(report.unused)
    if report.efficiency is not None:
        yield "filled", f"{percent(report.efficiency)} of the samples' positions"
