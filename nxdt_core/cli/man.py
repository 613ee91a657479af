"""``nxdt man``: the manual page, from the help texts."""

from __future__ import annotations

from collections.abc import Iterator

import click

from nxdt_core._version import __version__
from nxdt_core.cli.verb import Verb

_ENVIRONMENT = {
    "NO_COLOR": "Never colour.",
    "FORCE_COLOR": "Colour pipes and files too.",
    "COLUMNS": "Width of tables and messages.",
}
_STATUS = {
    "0": "Done.",
    "1": "A check found something, or a process died.",
    "2": "A mistake that you can fix.",
    "128+N": "Stopped by signal N.",
}


@click.command(cls=Verb, examples=("nxdt man > ~/.local/share/man/man1/nxdt.1",))
@click.pass_context
def man(ctx: click.Context) -> None:
    """Print the manual page nxdt(1), with all commands, also those of the installed plugins."""
    root = ctx.find_root().command
    assert isinstance(root, click.Group)
    click.echo("\n".join(_page(root)))


def _page(root: click.Group) -> Iterator[str]:
    yield f'.TH NXDT 1 "" "nxdt {__version__}" "User Commands"'
    yield from (".SH NAME", f"nxdt \\- {_plain(root.help)}", ".SH SYNOPSIS", ".B nxdt", "COMMAND [ARGUMENTS]...")
    yield ".SH COMMANDS"
    yield from _commands(("nxdt",), root)
    for title, rows in (("ENVIRONMENT", _ENVIRONMENT), ("EXIT STATUS", _STATUS)):
        yield f".SH {title}"
        for name, text in rows.items():
            yield from (".TP", f".B {_plain(name)}", _plain(text))


def _commands(path: tuple[str, ...], group: click.Group) -> Iterator[str]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from _commands((*path, name), command)
        elif command is not None:
            yield from _command((*path, name), command)


def _command(path: tuple[str, ...], command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(path))
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (f".SS {_plain(' '.join(path))}", f".B {_plain(' '.join(path))}", _plain(usage))
    for paragraph in (command.help or "").split("\n\n"):
        yield from (".PP", _plain(paragraph))
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and isinstance(parameter, click.Option):
            yield from (".TP", f".B {_plain(record[0])}", _plain(record[1]))
    examples = getattr(command, "examples", ())
    if examples:
        yield from (".PP", "Examples:", ".nf", *(f".RS\n{_plain(example)}\n.RE" for example in examples), ".fi")


def _plain(text: str | None) -> str:
    """Text on one line, with what roff would obey escaped."""
    line = " ".join((text or "").replace("\b", "").split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{line}" if line[:1] in (".", "'") else line
