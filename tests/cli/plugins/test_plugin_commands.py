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


def test_a_command_whose_module_exits_is_an_error(nxdt, dist):
    dist("acme", ENTRY.format(verb="greet", target="acme_commands:greet"), acme_commands="raise SystemExit(0)")
    done = nxdt("greet")
    assert done.returncode == 2
    assert "called sys.exit(0)" in done.stderr


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


def contribute(dist, plugin, *verbs):
    """A plugin of that name whose commands print their owner."""
    records = ", ".join(f'CliCommand(name={v!r}, target="{plugin}_commands:greet", summary="Greet.")' for v in verbs)
    entry = f"from nxdt_core.api import CliCommand, hookimpl\n@hookimpl\ndef nxdt_cli():\n    return [{records}]\n"
    dist(plugin, entry, **{f"{plugin}_commands": BODY.format(name=plugin)})


def test_a_name_of_two_words_lands_in_the_group_of_the_core(nxdt, dist):
    contribute(dist, "acme", "checkpoint greet", "config greet")
    assert nxdt("checkpoint", "greet").stdout == nxdt("config", "greet").stdout == "hello from acme\n"
    for group in ("checkpoint", "config"):
        text = nxdt(group, "--help").stdout
        assert re.search(r"Commands of plugins:\n(  .*\n)*  greet +Greet\.$", text, re.MULTILINE)
        assert "\n  greet" not in text.partition("Commands of plugins:")[0]
    assert "greet" not in nxdt("--help").stdout


def test_a_group_that_the_core_does_not_have_is_made(nxdt, dist):
    contribute(dist, "acme", "herd greet", "herd wave")
    assert nxdt("herd", "wave").stdout == "hello from acme\n"
    assert re.search(r"^  herd +Commands of plugins: greet, wave\.$", nxdt("--help").stdout, re.MULTILINE)
    assert "Did you mean 'wave'" in nxdt("herd", "wav").stderr


def test_nobody_replaces_a_verb_in_a_group(nxdt, dist):
    contribute(dist, "acme", "checkpoint list", "herd greet")
    contribute(dist, "bolt", "herd greet", "herd")
    assert nxdt("acme:list").returncode == 2
    assert nxdt("checkpoint", "acme:list").stdout == "hello from acme\n"
    assert "URI" in nxdt("checkpoint", "list", "--help").stdout
    assert nxdt("herd", "bolt:greet").stdout == nxdt("bolt:herd").stdout == "hello from bolt\n"
    assert nxdt("herd", "greet").returncode == 2


def test_a_verb_of_the_core_asks_no_plugin(nxdt, dist):
    dist("broken", "import sys\nprint('asked', file=sys.stderr)")
    assert "asked" in nxdt("--help").stderr
    assert "asked" not in nxdt("checkpoint", "list", "--help").stderr
