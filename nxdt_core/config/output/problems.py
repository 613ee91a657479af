"""Orders problems for the reader and drops those that only repeat another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nxdt_core.config.migration.programs import program_of, recognising
from nxdt_core.config.schema.legacy import PROGRAM
from nxdt_core.config.sources.node import Node, to_plain
from nxdt_core.config.sources.recipes import RECIPE_SCHEME
from nxdt_core.errors.configuration import (
    ConfigError,
    ConfigFileNotFound,
    ConfigProblem,
    ConflictingKeys,
    ImpossibleCombination,
    Misfit,
    NotSupported,
)
from nxdt_core.kernel import Kernel

__all__ = ["error_report"]


def error_report(
    label: str,
    problems: Iterable[ConfigProblem],
    followers: Mapping[str, str],
    given: Node | None = None,
    kernel: Kernel | None = None,
) -> ConfigError:
    """Return one error of all problems: by line of the file first, then those of the command line and of defaults.

    Args:
        label: What the user named.
        problems: In the order in which they were found.
        followers: Key → key that it takes its value from.
        given: What was written; None where it could not be read.
        kernel: Its plugins recognise files of other programs; None where it could not be started.
    """
    found = list(_one_per_cause(problems))
    keys = {problem.key for problem in found}
    kept: dict[tuple[str, str, str], ConfigProblem] = {}
    for problem in found:
        repeats = followers.get(problem.key) in keys and not isinstance(problem, ConflictingKeys)
        if not repeats:
            kept.setdefault((problem.place, problem.key, problem.row()), problem)
    if not kept:
        raise RuntimeError(f"{label} was refused without a problem that says why: {found}")
    ordered = sorted(kept.values(), key=lambda problem: (problem.line == 0, problem.line))
    migrates = None if label.startswith(RECIPE_SCHEME) or kernel is None else _migration(given, ordered, kernel)
    install = kernel.registry.missing_dist("migration", migrates[0]) if migrates and kernel else None
    return ConfigError(source=label, problems=tuple(ordered), migrates=migrates, install=install)


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


def _migration(given: Node | None, problems: Sequence[ConfigProblem], kernel: Kernel) -> tuple[str, str] | None:
    """Return value of ``--from`` and program where a migration would help: the file is of another program, and more
    than a path is wrong."""
    found = recognising(_of_files(given), kernel) if given is not None else []
    named = (found[0].record.name, program_of(found[0])) if found else None
    if any(isinstance(problem, NotSupported) and problem.of_legacy for problem in problems):
        return named or PROGRAM
    if given is None or all(isinstance(problem, ConfigFileNotFound) for problem in problems):
        return None
    own = given.find("model.name") is not None or given.find("data.name") is not None
    return None if own else named


def _of_files(given: Node) -> dict[str, Any]:
    """What files say, without overrides."""
    tree = Node({}, given.origin)
    for path, node in given.leaf_nodes():
        if path and node.origin.kind == "file":
            tree = tree.set(path, node)
    found: dict[str, Any] = to_plain(tree)
    return found
