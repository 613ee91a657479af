"""The scripts, by shell. Each hands the line up to the cursor to ``nxdt`` and shows what it answers."""

from __future__ import annotations

__all__ = ["SCRIPTS"]

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
