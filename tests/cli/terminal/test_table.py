"""Tables: aligned in a terminal and elsewhere, wrapped in a terminal only."""

import os
import re
import sys

import click
import pytest

from nxdt_core.cli.terminal import human_size, percent, print_facts, print_table, shade, wrap
from tests.sampling import slow
from tests.terminal import on_terminal


def test_columns_are_aligned_and_numbers_end_together(capsys):
    print_table(("STEP", "STATE", "URI"), [("5", shade("ok"), "a"), ("100", shade("damaged"), "b")], right=("STEP",))
    assert capsys.readouterr().out.splitlines() == ["STEP  STATE    URI", "   5  ok       a", " 100  damaged  b"]


def test_a_column_without_any_value_is_left_out(capsys):
    print_table(("A", "B", "C"), [("1", "", "x"), ("2", "", "y")])
    assert capsys.readouterr().out.splitlines() == ["A  C", "1  x", "2  y"]


def test_a_row_is_one_line_where_no_terminal_reads_it(capsys):
    print_table(("A", "B"), [("1", "word " * 100)])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_lines_of_the_last_cell_stand_under_each_other(capsys):
    print_table(("A", "B"), [("1", "first\nsecond")])
    assert capsys.readouterr().out.splitlines()[1:] == ["1  first", "   second"]


def test_facts_align_their_values(capsys):
    print_facts([("a", "1"), ("longer", "2")])
    assert capsys.readouterr().out.splitlines() == ["a       1", "longer  2"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (200 * 2**20, "200 MiB"),
        (3 * 2**40, "3.0 TiB"),
    ],
)
def test_sizes_have_few_digits(size, text):
    assert human_size(size) == text


def test_a_narrow_terminal_splits_no_word_of_a_table_or_a_note(tmp_path):
    program = (
        "from nxdt_core.cli.terminal import print_table, print_wrapped\n"
        "titles = ['GIB SENT', 'PP 0', 'PP 1', 'PP 2', 'PP 3', 'BY A RANK IN A STEP']\n"
        "print_table(titles, [['tp', *4 * ['1,568.00'], 'weights and gradients, data parallel']])\n"
        "print_wrapped('note', 'the schedule ends at step 40, but the run ends earlier: trainer.max_steps is 20')\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    status, text = on_terminal([sys.executable, "-c", program], cwd=tmp_path, env=env, columns=60)
    lines = click.unstyle(text).splitlines()
    assert status == 0
    assert max(map(len, lines)) <= 60
    assert "note: the schedule ends at step 40, but the run ends" in lines
    assert lines[-1] == "  earlier: trainer.max_steps is 20"
    assert {"gradients,", "parallel"} <= set(" ".join(lines).split())


def test_a_share_is_a_percentage_with_a_space():
    assert [percent(0.9591), percent(1, 0), percent(0)] == ["95.9 %", "100 %", "0.0 %"]


LISTINGS = ("plugins list", "plugins hooks", "plugins show builtin", "recipes list", "checkpoint list {store}")


@pytest.mark.parametrize("columns", [60, slow(80), 200])
@pytest.mark.parametrize("listing", LISTINGS)
def test_a_terminal_gets_lines_that_fit_it(listing, columns, nxdt, nxdt_on_terminal, store):
    args = listing.format(store=store).split()
    status, text = nxdt_on_terminal(*args, columns=columns)
    lines = [click.unstyle(line) for line in text.splitlines()]
    assert status == 0
    assert max(map(len, lines)) <= columns
    assert "\x1b[1m" in text
    first_column = [line.split()[0] for line in nxdt(*args).stdout.splitlines() if line[:1].strip()]
    if "show" not in args:  # its facts have other widths than its table
        assert [line.split()[0] for line in lines if line[:1].strip()] == first_column


@pytest.mark.parametrize("columns", [80, 200])
def test_words_stay_whole(columns, nxdt, nxdt_on_terminal):
    for args in (["recipes", "list"], ["plugins", "hooks"]):
        words = set(nxdt(*args).stdout.split())
        assert words == set(click.unstyle(nxdt_on_terminal(*args, columns=columns)[1]).split())


def test_a_narrow_terminal_gets_fewer_columns_rather_than_broken_words(nxdt_on_terminal, store):
    headers = {
        columns: re.search("STEP.*", click.unstyle(nxdt_on_terminal("checkpoint", "list", store, columns=columns)[1]))[
            0
        ].split()
        for columns in (45, 200)
    }
    assert headers[200] == ["STEP", "TIME", "(UTC)", "STATE", "SIZE", "MESH", "METRICS"]
    assert headers[45] == ["STEP", "TIME", "(UTC)", "STATE", "SIZE", "MESH"]


def test_many_components_are_counted_by_kind(nxdt):
    (builtin,) = [line for line in nxdt("plugins", "list").stdout.splitlines() if line.startswith("builtin")]
    assert re.search(r" \d+ optimizers, \d+ schedules, \d+ precisions, 1 store,", builtin)


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("one two three", 8, ["one two", "three"]),
        ("  one two three", 8, ["  one", "  two", "  three"]),
        ("s3://bucket/a/prefix", 10, ["s3://", "bucket/a/", "prefix"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("\x1b[32mnot trusted\x1b[0m", 8, ["\x1b[32mnot\x1b[0m", "\x1b[32mtrusted\x1b[0m"]),
        ("学習 する モデル", 8, ["学習", "する", "モデル"]),
        ("", 5, [""]),
    ],
)
def test_text_wraps_between_words(text, width, lines):
    assert wrap(text, width) == lines
