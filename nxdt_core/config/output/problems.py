"""Orders problems for the reader and drops those that only repeat another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nxdt_core.errors.configuration import ConfigError, ConfigProblem, ImpossibleCombination, Misfit

__all__ = ["error_report"]


def error_report(label: str, problems: Iterable[ConfigProblem], followers: Mapping[str, str]) -> ConfigError:
    """Return one error of all problems: by line of the file first, then those of the command line and of defaults.

    Args:
        label: What the user named.
        problems: In the order in which they were found.
        followers: Key → key that it takes its value from.
    """
    found = list(_one_per_cause(problems))
    keys = {problem.key for problem in found}
    kept: dict[tuple[str, str, str], ConfigProblem] = {}
    for problem in found:
        if followers.get(problem.key) not in keys:
            kept.setdefault((problem.place, problem.key, problem.row()), problem)
    if not kept:
        raise RuntimeError(f"{label} was refused without a problem that says why: {found}")
    ordered = sorted(kept.values(), key=lambda problem: (problem.line == 0, problem.line))
    return ConfigError(source=label, problems=tuple(ordered))


def _one_per_cause(problems: Iterable[ConfigProblem]) -> Iterator[ConfigProblem]:
    """Yield the problems; those of values that one other value does not divide become one, in place of the first."""
    found = list(problems)
    sharing: dict[str, list[Misfit]] = {}
    for problem in found:
        if isinstance(problem, ImpossibleCombination) and problem.cause:
            sharing.setdefault(problem.cause.of, []).append(problem.cause)
    for problem in found:
        cause = problem.cause if isinstance(problem, ImpossibleCombination) else None
        if cause is None or len(sharing[cause.of]) == 1:
            yield problem
        elif cause is sharing[cause.of][0]:
            yield _merged(sharing[cause.of])


def _merged(misfits: Sequence[Misfit]) -> ImpossibleCombination:
    first = misfits[0]
    numbers = {each.name: each.number for each in misfits}
    fitting = math.gcd(*numbers.values())
    values = ", ".join(f"{name} {number}" for name, number in numbers.items())
    return ImpossibleCombination(
        **first.place,
        reason=f"{first.divisor} fits none of {values}",
        advice=f"Set it to {fitting} or a divisor of it, or change those values."
        if fitting > 1
        else "Set it to 1, or change those values.",
    )
