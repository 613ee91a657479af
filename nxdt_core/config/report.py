"""Orders problems for the reader and drops those that only repeat another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nxdt_core.config.frameworks import FRAMEWORKS, framework_of
from nxdt_core.config.node import Node
from nxdt_core.config.recipes import RECIPE_SCHEME
from nxdt_core.errors import ConfigError, ConfigFileNotFound, ConfigProblem, ConflictingKeys, NotSupported

__all__ = ["error_report"]


_INCUMBENT = ("model_source", "model_alignment_strategy", "aync_exec_max_inflight_requests")
"""Keys that files of NxD Training have; those that were written for nxdt name their model and data beside them."""


def error_report(
    label: str, problems: Iterable[ConfigProblem], followers: Mapping[str, str], given: Node | None = None
) -> ConfigError:
    """One error of all problems: by line of the file first, then those of the command line and of defaults.

    Args:
        label: What the user named.
        problems: In the order in which they were found.
        followers: Key → key that it takes its value from.
        given: What was written; None where it could not be read.
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
    migrates = not label.startswith(RECIPE_SCHEME) and _migrates(given, ordered)
    framework = (framework_of(given)[0] if given is not None else "") or "nxdt"
    return ConfigError(
        source=label, problems=tuple(ordered), migrates=(framework, FRAMEWORKS[framework]) if migrates else None
    )


def _shows_nemo(given: Node) -> tuple[str, ...]:
    framework, key = framework_of(given)
    return (key,) if framework in ("nemo", "nnm") else ()


def _migrates(given: Node | None, problems: Iterable[ConfigProblem]) -> bool:
    """Return whether a migration would help: it is another framework's file, and more than a path is wrong."""
    if any(isinstance(problem, NotSupported) and problem.of_incumbent for problem in problems):
        return True
    if given is None or all(isinstance(problem, ConfigFileNotFound) for problem in problems):
        return False
    keys = [*_INCUMBENT, *_shows_nemo(given)]
    theirs = any(node.origin.kind == "file" for key in keys if (node := given.find(key)) is not None)
    return theirs and given.find("model.name") is None and given.find("data.name") is None
