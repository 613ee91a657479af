"""``nxdt completion``: shell scripts that ask ``nxdt`` itself what may follow on a command line."""

from __future__ import annotations

import os

import click

from nxdt_core.cli.terminal.completion_scripts import SCRIPTS
from nxdt_core.cli.verb import Verb

__all__ = ["REQUEST", "answer", "completion"]

REQUEST = "_NXDT_COMPLETE"
"""Variable by which a script asks; ``COMP_LINE`` then has the command line up to the cursor."""


@click.command(
    cls=Verb,
    short_help="Print a script that completes nxdt in a shell.",
    examples=(
        "nxdt completion bash > ~/.local/share/bash-completion/completions/nxdt",
        "nxdt completion zsh > ~/.zfunc/_nxdt",
        "nxdt completion fish > ~/.config/fish/completions/nxdt.fish",
    ),
)
@click.argument("shell", type=click.Choice(tuple(SCRIPTS)))
def completion(shell: str) -> None:
    """Print a script for SHELL that completes commands, options, recipes, configuration keys and component names.

    Source it, or write it where the shell looks for completions. A zsh needs that directory in fpath before compinit.
    """
    click.echo(SCRIPTS[shell], nl=False)


def answer(root: click.Group) -> None:
    """Print what may follow on the command line of ``COMP_LINE``: a line ``KIND<tab>VALUE`` for each.

    The kind is ``plain``, ``open`` where no space follows, or ``files`` where the shell completes paths.
    """
    from click.shell_completion import ShellComplete, split_arg_string

    line = os.environ.get("COMP_LINE", "")
    words = split_arg_string(line)[1:]
    incomplete = "" if not words or line[-1:].isspace() else words.pop()
    kinds = {"file": "files", "dir": "files"}
    for item in ShellComplete(root, {}, "nxdt", REQUEST).get_completions(words, incomplete):
        click.echo(f"{kinds.get(item.type, item.type)}\t{item.value if item.value else ''}")
