"""``nxdt checkpoint diff``."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from nxdt_core.cli.checkpoint.store import EXAMPLE_URI, open_one
from nxdt_core.cli.terminal import byte_bar, print_table
from nxdt_core.cli.verb import Verb, as_json, print_json, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nxdt_core.checkpoint.format.state_tree import ValueDifference
    from nxdt_core.cli.checkpoint.difference import Difference, Side, TensorDifference


_ROWS = 20
"""Rows of each kind that a person is shown; ``--json`` has them all."""
_CELL = 60
"""Characters of a value that a person is shown."""


@click.command(
    cls=Verb,
    examples=(
        f"nxdt checkpoint diff {EXAMPLE_URI}/step-00000020 {EXAMPLE_URI}/step-00000040",
        f"nxdt checkpoint diff {EXAMPLE_URI} s3://my-bucket/llama-tiny --only model --only optim",
    ),
)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "--only",
    "subjects",
    multiple=True,
    type=click.Choice(["model", "optim", "state", "config"]),
    help="What to compare; may be given several times. Everything unless given.",
)
@as_json
@click.pass_context
def diff(ctx: click.Context, first: str, second: str, subjects: tuple[str, ...], json_output: bool) -> None:
    """Compare the checkpoints A and B, bit by bit: addresses of steps, or of stores whose newest one is meant.

    They may be saved in different layouts. Exit status 1 where anything differs.
    """
    from nxdt_core.cli.checkpoint.difference import SUBJECTS, Side, compare_checkpoints

    sides = Side(*open_one(first)), Side(*open_one(second))
    chosen = [subject for subject in SUBJECTS if subject in subjects or not subjects]
    size = sum(entry.size_bytes for entry in sides[0].manifest.files.values())
    with byte_bar(size, "comparing") as progress:
        found = compare_checkpoints(*sides, subjects=chosen, progress=progress)
    if json_output:
        print_json(_facts(sides, found))
    else:
        _print(sides, found)
    ctx.exit(0 if found.is_empty else 1)


def _facts(sides: Sequence[Side], found: Difference) -> dict[str, object]:
    return {
        "equal": found.is_empty,
        "a": _address(sides[0]),
        "b": _address(sides[1]),
        "tensors_compared": found.tensors_compared,
        "only_in_a": found.only_in[0],
        "only_in_b": found.only_in[1],
        "tensors": [
            {name: _finite(value) if isinstance(value, float) else value for name, value in asdict(each).items()}
            for each in found.tensors
        ],
        "values": [
            {"where": each.where, "path": each.path, "a": each.values[0], "b": each.values[1], "only_in": _ab(each)}
            for each in found.values
        ],
    }


def _print(sides: Sequence[Side], found: Difference) -> None:
    for name, side in zip("AB", sides, strict=True):
        say(f"{name}  {_address(side)}")
    if found.is_empty:
        click.echo(f"They are equal, bit by bit: {found.tensors_compared:,} tensors.")
        return
    for name, names in zip("AB", found.only_in, strict=True):
        _print_some(f"Only in {name}", ("NAME",), [(each,) for each in names])
    _print_some(
        f"Tensors that differ, of {found.tensors_compared:,} in both",
        ("ELEMENTS", "LARGEST", "RELATIVE", "SHAPES AND DTYPES", "NAME"),
        [_row(each) for each in found.tensors],
    )
    _print_some("Values that differ", ("IN", "KEY", "A", "B"), [_value_row(each) for each in found.values])


def _print_some(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    click.echo(f"\n{title}: {len(rows):,}")
    print_table(header, rows[:_ROWS], right=("ELEMENTS", "LARGEST", "RELATIVE"))
    if len(rows) > _ROWS:
        click.echo(f"… and {len(rows) - _ROWS:,} more; --json has them all.")


def _row(each: TensorDifference) -> tuple[str, ...]:
    kinds = [
        f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}"
        for shape, dtype in zip(each.shapes, each.dtypes, strict=True)
    ]
    kind = kinds[0] if kinds[0] == kinds[1] else " / ".join(kinds)
    name = f"{each.section}/{each.name}"
    if each.elements_differing is None:
        return ("", "", "", kind, name)
    return (f"{each.elements_differing:,}", f"{each.max_abs_difference:.3g}", f"{each.relative_norm:.3g}", kind, name)


def _value_row(each: ValueDifference) -> tuple[str, ...]:
    cells = ["-" if each.only_in == 1 - side else _short(value) for side, value in enumerate(each.values)]
    return (each.where, each.path, *cells)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _CELL else f"{text[: _CELL - 1]}…"


def _address(side: Side) -> str:
    from nxdt_core.checkpoint.format.file_names import step_name

    return f"{side.storage.uri}/{step_name(side.manifest.step)}"


def _ab(each: ValueDifference) -> str | None:
    return None if each.only_in is None else "ab"[each.only_in]


def _finite(number: float) -> float | None:
    """JSON has no infinities and no NaN."""
    return number if math.isfinite(number) else None
