"""Every verb has a help text whose examples are command lines that parse."""

import shlex

import click
import pytest

from nxdt_core.cli.app import COMMANDS, root
from nxdt_core.cli.checkpoint import VERBS as VERBS_OF_CHECKPOINT


def verbs(command=root, path=("nxdt",)):
    """Every command with the words that call it, groups before their verbs."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        names = COMMANDS if command is root else command.list_commands(context)
        for name in names:
            child = command.get_command(context, name)
            yield (*path, name), child
            yield from verbs(child, (*path, name))


VERBS = dict(verbs())
LEAVES = [path for path, verb in VERBS.items() if not isinstance(verb, click.Group)]


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_help_ends_with_examples_of_the_verb_itself(path):
    command = VERBS[path]
    text = command.get_help(click.Context(command, info_name=" ".join(path)))
    examples = text.partition("Examples:\n")[2].splitlines()
    assert examples
    assert all(line.strip().startswith(" ".join(path)) for line in examples)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_examples_parse(path):
    for example in VERBS[path].examples:
        words = shlex.split(example.partition(" > ")[0])
        VERBS[path].make_context(" ".join(path), words[len(path) :])


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_every_option_is_explained(path):
    options = [parameter for parameter in VERBS[path].params if isinstance(parameter, click.Option)]
    assert all(option.help for option in options)


def test_summaries_shown_without_importing_are_those_of_the_commands():
    for name, entry in {**COMMANDS, **VERBS_OF_CHECKPOINT}.items():
        assert entry.load().get_short_help_str(limit=100) == entry.summary, name


def test_the_root_lists_every_command(nxdt):
    done = nxdt("--help")
    assert done.returncode == 0
    assert all(entry.summary in done.stdout for entry in COMMANDS.values())
    assert nxdt().stdout == "" or "Usage: nxdt" in nxdt().stdout + nxdt().stderr


def test_the_root_lists_commands_by_section_within_80_columns():
    formatter = click.HelpFormatter(width=80)
    root.format_commands(click.Context(root), formatter)
    lines = formatter.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == [f"{section}:" for section in dict.fromkeys(each.section for each in COMMANDS.values())] + [
        "Commands of plugins:"
    ]
    below = lines[lines.index("Train:") + 1 : lines.index("")]
    assert [line.split()[0] for line in below] == [name for name, each in COMMANDS.items() if each.section == "Train"]
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert listed == root.list_commands(click.Context(root))


def test_version_is_that_of_the_package(nxdt):
    from nxdt_core import __version__

    assert nxdt("--version").stdout == f"nxdt {__version__}\n"
