"""Commands that plugins add under ``nxdt``."""

import re

ENTRY = """
from nxdt_core.api import CliCommand, hookimpl

@hookimpl
def nxdt_cli():
    return [CliCommand(name={verb!r}, target={target!r}, summary="Greet.")]
"""

BODY = """
import click

@click.command()
def greet():
    click.echo("hello from {name}")
"""


def test_a_plugins_command_is_listed_and_runs(nxdt, dist):
    dist("acme", ENTRY.format(verb="greet", target="acme_commands:greet"), acme_commands=BODY.format(name="acme"))
    assert re.search(r"^  greet +Greet\.$", nxdt("--help").stdout, re.MULTILINE)
    assert nxdt("greet").stdout == "hello from acme\n"


def test_listing_does_not_import_the_command(nxdt, dist):
    dist("acme", ENTRY.format(verb="greet", target="acme_commands:greet"), acme_commands="raise SystemExit(9)")
    assert re.search(r"^  greet +Greet\.$", nxdt("--help").stdout, re.MULTILINE)


def test_nobody_replaces_a_command_of_the_core(nxdt, dist):
    dist("acme", ENTRY.format(verb="train", target="acme_commands:greet"), acme_commands=BODY.format(name="acme"))
    assert "hello" not in nxdt("train", "--help").stdout
    assert nxdt("acme:train").stdout == "hello from acme\n"


def test_two_plugins_with_one_verb_are_both_reached_by_their_names(nxdt, dist):
    for name in ("acme", "bolt"):
        dist(
            name,
            ENTRY.format(verb="greet", target=f"{name}_commands:greet"),
            **{f"{name}_commands": BODY.format(name=name)},
        )
    assert nxdt("greet").returncode == 2
    assert nxdt("acme:greet").stdout == "hello from acme\n"
    assert nxdt("bolt:greet").stdout == "hello from bolt\n"


def test_a_broken_plugin_takes_no_command_away(nxdt, dist):
    dist("broken", "raise RuntimeError('at import')")
    done = nxdt("--help")
    assert done.returncode == 0
    assert "train" in done.stdout
    assert "Traceback" not in done.stderr
