"""Tables: aligned in a terminal and elsewhere, wrapped in a terminal only."""

import fcntl
import os
import pty
import struct
import sys
import termios

import pytest

from nxdt_core.cli.terminal.table import human_size, print_facts, print_table, shade


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


def test_a_terminal_gets_lines_that_fit_it():
    lines = _in_terminal(80, "plugins", "hooks").decode().splitlines()
    assert max(len(line.replace("\x1b[1m", "").replace("\x1b[0m", "")) for line in lines) <= 80
    assert lines[0].startswith("\x1b[1mHOOK")


def _in_terminal(columns, *args):
    child, terminal = pty.fork()
    if child == 0:
        os.environ.pop("COLUMNS", None)
        os.execv(sys.executable, [sys.executable, "-m", "nxdt_core", *args])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    output = b""
    while True:
        try:
            output += os.read(terminal, 65536)
        except OSError:  # how Linux says that the other side is closed
            os.waitpid(child, 0)
            return output
