"""Orders problems for the reader and drops those that only repeat another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nxdt_core.errors import ConfigError, ConfigProblem, ConflictingKeys

__all__ = ["error_report"]


def error_report(label: str, problems: Iterable[ConfigProblem], followers: Mapping[str, str]) -> ConfigError:
    """One error of all problems: by line of the file first, then those of the command line and of defaults.

    Args:
        label: What the user named.
        problems: In the order in which they were found.
        followers: Key → key that it takes its value from.
    """
    found = list(problems)
    keys = {problem.key for problem in found}
    kept: dict[tuple[str, str, str], ConfigProblem] = {}
    for problem in found:
        repeats = followers.get(problem.key) in keys and not isinstance(problem, ConflictingKeys)
        if not repeats:
            kept.setdefault((problem.place, problem.key, problem.row()), problem)
    if not kept:
        raise RuntimeError(f"{label} was refused without a problem that says why: {found}")
    ordered = sorted(kept.values(), key=lambda problem: (problem.line == 0, problem.line))
    return ConfigError(source=label, problems=tuple(ordered))
