"""``nxdt data``: preview the samples of a run. Plugins add verbs that prepare data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.groups import LazyCommand, SuggestingGroup
from nxdt_core.cli.terminal import percent, print_facts, print_table
from nxdt_core.cli.verb import Verb, as_json, config_arguments, print_json, print_note
from nxdt_core.system.visible_text import visible

if TYPE_CHECKING:
    from nxdt_core.data.preview import Part, Preview, ShownDocument, ShownSample
    from nxdt_core.protocols.dataset import DataReport, SplitName, TokenCount


VERBS = {
    "preview": LazyCommand("nxdt_core.cli.data:preview", "Show what a run would train on, token by token."),
}
"""The verbs, in the order of the help text."""


@click.group(
    cls=SuggestingGroup,
    lazy=VERBS,
    examples=("nxdt data preview recipe:llama-tiny", "nxdt data preview my_run.yaml -n 1 --ids"),
)
def data() -> None:
    """Preview and prepare training data."""


@click.command(
    cls=Verb,
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
    from nxdt_core.cli.checks import require_set
    from nxdt_core.config import load

    config = load(source, overrides)
    require_set(config)
    for note in config.notes:
        print_note(note)

    from nxdt_core.train.data import preview as look  # imports torch: only a right configuration pays for it

    found = look(config, split, samples, whole=whole)
    if json_output:
        content = (
            {"sets": {name: _json(each) for name, each in found.items()}} if isinstance(found, dict) else _json(found)
        )
        print_json({"source": source, "split": split, "seq_length": config.run.data.seq_length, **content})
        return

    title = f"{split} samples of {source}"
    for name, each in found.items() if isinstance(found, dict) else [("", found)]:
        print_preview(each, samples, title=f"{title}: {name}" if name else title, ids=ids)


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


_BAD = 20
"""Bad records that are listed."""
_TURNS = 8
"""Turns that the table has rows for; later ones share the last."""


def print_preview(found: Preview, documents: int, *, title: str, ids: bool) -> None:
    """Print the first documents, then counts.

    Args:
        found: the preview of one dataset.
        documents: to print; the rows of a sample, such as a chosen and a rejected answer, count once.
        title: what the samples are from, for the first line.
        ids: put each token's id behind it.
    """
    coloured = _coloured()
    printed = 0
    for _, group in groupby(found.shown, attrgetter("index")):
        if printed >= documents:
            break
        sample = list(group)
        for row in sample:
            _print_sample(row, printed, documents, ids, coloured)
        printed += max(len(row.documents) for row in sample)
    print_facts(list(_facts(found, title)))
    rows = [(role, *_cells(count)) for role, count in found.report.by_role.items()]
    rows += [(f"assistant's turn {name}", *_cells(count)) for name, count in _turns(found.report)]
    if rows:
        click.echo()
        print_table(("OF", "TOKENS", "TRAINED", "SHARE"), rows, right=("TOKENS", "TRAINED"))


def length_summary(report: DataReport) -> dict[str, float]:
    """Return the tokens of the records: least, median, mean, 95 % have at most, most. Empty without records."""
    if not len(report.lengths):
        return {}
    ordered = sorted(report.lengths.tolist())
    least, median, most_of, most = (ordered[int(share * (len(ordered) - 1))] for share in (0, 0.5, 0.95, 1))
    return {"min": least, "median": median, "mean": float(report.lengths.mean()), "p95": most_of, "max": most}


def _coloured() -> bool:
    """Return whether the output is coloured, by the same rule as click."""
    wanted = click.get_current_context().color
    return sys.stdout.isatty() if wanted is None else wanted


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
        click.echo("".join(_part(part, ids, coloured) for part in document.parts))
    if end > most:
        click.secho(f"── {end - most} more in this sample: -n {end} ──", bold=True)
    click.echo()


def _part(part: Part, ids: bool, coloured: bool) -> str:
    text = _with_ids(part, coloured) if ids or not part.text else _shaded(visible(part.text), part.trained, coloured)
    return f"⟦{text}⟧" if part.trained and not coloured else text


def _with_ids(part: Part, coloured: bool) -> str:
    pairs = zip(part.texts, part.ids, strict=True)
    return "".join(_shaded(visible(text), part.trained, coloured) + _small(f"·{id_}·", coloured) for text, id_ in pairs)


def _shaded(text: str, trained: bool, coloured: bool) -> str:
    """Trained text, green and underlined; its line ends show, since they are tokens with a loss."""
    if not coloured or not trained:
        return text
    return click.style(text.replace("\n", "↵\n"), fg="green", underline=True)


def _small(text: str, coloured: bool) -> str:
    return click.style(text, fg="magenta") if coloured else text


def _facts(found: Preview, title: str) -> Iterator[tuple[str, str]]:
    from nxdt_core.data.files.records import count_records, describe_unused

    report = found.report
    known = found.samples is not None and report.of_records is None
    yield "data", f"{title}, {found.samples:,} in all" if known else title
    if found.counted is not None:
        yield "counted", f"the first {found.counted:,} samples"
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


def _turns(report: DataReport) -> Iterator[tuple[str, TokenCount]]:
    from nxdt_core.protocols.dataset import TokenCount

    turns = list(report.by_turn)
    for number, count in enumerate(turns[: _TURNS - 1], start=1):
        yield str(number), count
    rest = turns[_TURNS - 1 :]
    if rest:
        name = str(_TURNS) if len(rest) == 1 else f"{_TURNS} and later"
        yield name, TokenCount(tokens=sum(c.tokens for c in rest), trained=sum(c.trained for c in rest))


def _cells(count: TokenCount) -> tuple[str, str, str]:
    return f"{count.tokens:,}", f"{count.trained:,}", percent(count.trained / max(count.tokens, 1))
