"""``nxdt completion``: shell scripts that ask ``nxdt`` what may follow on a line. ``nxdt man``: the manual page."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click

from nxdt_core._version import __version__
from nxdt_core.cli.verb import verb

SCRIPTS = {
    "bash": r"""# bash completion of nxdt
_nxdt_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" word start="" mark kind value
    word="${line##*[[:space:]]}"
    # bash completes what is after the last of these characters, where they are in COMP_WORDBREAKS.
    for mark in : =; do
        if [[ $COMP_WORDBREAKS == *"$mark"* && ${#word} -gt 0 && $word == *"$mark"* ]]; then
            value="${word%"${word##*"$mark"}"}"
            [[ ${#value} -gt ${#start} ]] && start="$value"
        fi
    done
    COMPREPLY=()
    while IFS=$'\t' read -r kind value; do
        case $kind in
            files) compopt -o default ;;
            open) compopt -o nospace; COMPREPLY+=("${value#"$start"}") ;;
            *) COMPREPLY+=("${value#"$start"}") ;;
        esac
    done < <(COMP_LINE="$line" _NXDT_COMPLETE=1 "$1" 2>/dev/null)
}
complete -o nosort -F _nxdt_completion nxdt
""",
    "zsh": r"""#compdef nxdt
_nxdt_completion() {
    local -a closed open
    local kind value files=""
    while IFS=$'\t' read -r kind value; do
        case $kind in
            files) files=1 ;;
            open) open+=("$value") ;;
            *) closed+=("$value") ;;
        esac
    done < <(COMP_LINE="${(j: :)words[1,CURRENT]}" _NXDT_COMPLETE=1 nxdt 2>/dev/null)
    (( ${#closed} )) && compadd -- "${closed[@]}"
    (( ${#open} )) && compadd -S '' -- "${open[@]}"
    [[ -n $files ]] && _files
}
if [[ $funcstack[1] == _nxdt ]]; then  # called by compinit as a file of fpath; else sourced
    _nxdt_completion "$@"
else
    compdef _nxdt_completion nxdt
fi
""",
    "fish": r"""# fish completion of nxdt
function _nxdt_completion
    for line in (env COMP_LINE=(commandline -cp | string collect) _NXDT_COMPLETE=1 nxdt 2>/dev/null)
        set -l parts (string split -m 1 \t -- $line)
        if test "$parts[1]" = files
            __fish_complete_path (commandline -ct)
        else
            echo $parts[2]
        end
    end
end
complete --no-files --command nxdt --arguments '(_nxdt_completion)'
""",
}
"""Scripts by shell, which ask for what may follow on the command line."""
REQUEST = "_NXDT_COMPLETE"
"""Variable by which a script asks; ``COMP_LINE`` then has the command line up to the cursor."""
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


@verb(
    "nxdt completion bash > ~/.local/share/bash-completion/completions/nxdt",
    "nxdt completion zsh > ~/.zfunc/_nxdt",
    "nxdt completion fish > ~/.config/fish/completions/nxdt.fish",
)
@click.argument("shell", type=click.Choice(tuple(SCRIPTS)))
def completion(shell: str) -> None:
    """Print a script for SHELL that completes commands, options, recipes, configuration keys and component names.

    Source it, or write it where the shell looks for completions. For zsh, add that directory to fpath before compinit.
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


@verb("nxdt man > ~/.local/share/man/man1/nxdt.1")
@click.pass_context
def man(ctx: click.Context) -> None:
    """Print the manual page nxdt(1), with all commands, also those of the installed plugins."""
    root = ctx.find_root().command
    assert isinstance(root, click.Group)
    lines = [f'.TH NXDT 1 "" "nxdt {__version__}" "User Commands"', ".SH NAME", f"nxdt \\- {_plain(root.help)}"]
    lines += [".SH SYNOPSIS", ".B nxdt", "COMMAND [ARGUMENTS]...", ".SH COMMANDS", *_commands(("nxdt",), root)]
    for title, rows in (("ENVIRONMENT", _ENVIRONMENT), ("EXIT STATUS", _STATUS)):
        lines.append(f".SH {title}")
        for name, text in rows.items():
            lines += [".TP", f".B {_plain(name)}", _plain(text)]
    click.echo("\n".join(lines))


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
