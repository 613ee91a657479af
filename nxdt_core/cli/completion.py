"""``nxdt completion``: shell scripts that ask ``nxdt`` itself what may follow on a command line."""

from __future__ import annotations

import os

import click

from nxdt_core.cli.verb import Verb

_BASH = r"""# bash completion of nxdt
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
"""

_ZSH = r"""#compdef nxdt
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
"""

_FISH = r"""# fish completion of nxdt
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
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


REQUEST = "_NXDT_COMPLETE"
"""Variable by which a script asks; ``COMP_LINE`` then has the command line up to the cursor."""


@click.command(
    cls=Verb,
    examples=(
        "nxdt completion bash > ~/.local/share/bash-completion/completions/nxdt",
        "nxdt completion zsh > ~/.zfunc/_nxdt",
        "nxdt completion fish > ~/.config/fish/completions/nxdt.fish",
    ),
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
