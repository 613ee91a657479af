"""The report of ``nxdt data preview`` for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from nxdt_core.cli.terminal.table import percent, print_facts, print_table
from nxdt_core.data.files.records import describe_unused
from nxdt_core.data.preview import Part, Preview, ShownDocument, ShownSample
from nxdt_core.protocols.dataset import DataReport, TokenCount
from nxdt_core.visible_text import visible

__all__ = ["length_summary", "print_preview"]

_BAD = 20
"""Bad records that are listed."""
_TURNS = 8
"""Turns that the table has rows for; later ones share the last."""


def print_preview(found: Preview, *, title: str, ids: bool) -> None:
    """Print samples, then counts.

    Args:
        found: what to show.
        title: what the samples are of.
        ids: put each token's id behind it.
    """
    coloured = _coloured()
    for sample in found.shown:
        _print_sample(sample, ids, coloured)
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
    """Whether colours reach the reader; click asks the same."""
    wanted = click.get_current_context().color
    return sys.stdout.isatty() if wanted is None else wanted


def _print_sample(sample: ShownSample, ids: bool, coloured: bool) -> None:
    filled = sample.length - sample.padding
    row = f", row {sample.row}" if sample.row else ""
    click.secho(f"sample {sample.index}{row}: {filled:,} of {sample.length:,} positions filled", bold=True)
    for number, document in enumerate(sample.documents):
        count = document.count
        click.secho(f"── document {number}: {count.tokens:,} tokens, {count.trained:,} trained ──", bold=True)
        click.echo(_text(document, ids, coloured))
    click.echo()


def _text(document: ShownDocument, ids: bool, coloured: bool) -> str:
    return "".join(_part(part, ids, coloured) for part in document.parts)


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
        yield "truncated", f"{report.truncated:,} records"
    for reason, count in report.left_out.items():
        yield "left out", f"{count:,} records: {reason}"
    for reason in report.bad[:_BAD]:
        yield "", reason
    if report.unused:
        yield "unused", describe_unused(report.unused)
    if report.efficiency is not None:
        yield "filled", f"{percent(report.efficiency)} of the samples' positions"


def _turns(report: DataReport) -> Iterator[tuple[str, TokenCount]]:
    turns = list(report.by_turn)
    for number, count in enumerate(turns[: _TURNS - 1], start=1):
        yield str(number), count
    rest = turns[_TURNS - 1 :]
    if rest:
        name = str(_TURNS) if len(rest) == 1 else f"{_TURNS} and later"
        yield name, TokenCount(tokens=sum(c.tokens for c in rest), trained=sum(c.trained for c in rest))


def _cells(count: TokenCount) -> tuple[str, str, str]:
    return f"{count.tokens:,}", f"{count.trained:,}", percent(count.trained / max(count.tokens, 1))
