"""How the tests of a file of mutants end, each mutant under the test that shall catch it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import pytest

from tests import sampling
from tests.sampling import slow_except, takes_all

__all__ = [
    "CaughtBy",
    "Outcomes",
    "asked",
    "assert_fails_where_wrong",
    "every_third",
    "requirements",
    "run_contract",
    "run_mutants",
    "without",
]

CaughtBy = Mapping[str, AbstractSet[str]]
"""Mutant, or ``Right`` → the requirements that it breaks."""


class Outcomes:
    """Pytest plugin that notes how each test of each class ended."""

    def __init__(self) -> None:
        self.failed: set[tuple[str, str]] = set()
        self.passed: set[tuple[str, str]] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _, class_name, test = report.nodeid.split("::", 2)
        if report.failed:
            self.failed.add((class_name.removeprefix("Test"), test))
        elif report.when == "call" and report.passed:
            self.passed.add((class_name.removeprefix("Test"), test))


def run_contract(
    file: Path, right: Iterable[str], caught_by: Mapping[str, str] | Iterable[tuple[str, str]], *more: str
) -> Outcomes:
    """Run the right ones of a file under all tests, and each mutant under the one that shall catch it, or several;
    ``more`` options of pytest."""
    pairs = caught_by.items() if isinstance(caught_by, Mapping) else caught_by
    plugin = Outcomes()
    wanted = [f"{file}::Test{name}" for name in right]
    wanted += [f"{file}::Test{mutant}::{test}" for mutant, test in pairs]
    options = ["-q", "--no-header", "--tb=no", "--show-capture=no", "-r", "", "-p", "no:cacheprovider"]
    pytest.main([*wanted, *options, *more], plugins=[plugin])
    return plugin


def every_third(mutants: Iterable[Any], *, slow: Container[str] = ()) -> list[Any]:
    """Return cases for ``parametrize``: ``Right`` and every third mutant, the others in the slow tests.

    ``slow`` are further mutants that are left out by default: others are caught by the same test.
    """
    cases = [*mutants]
    names = [case[0] if isinstance(case, tuple) else case for case in cases]
    taken = [case for name, case in zip(names[::3], cases[::3], strict=True) if name not in slow]
    return slow_except(cases, ["Right", *taken])


def asked(request: pytest.FixtureRequest, caught_by: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the tests of this run ask for: ``Right``, and the mutants that are parameters of a test."""
    names = {*sampling.asked(request, "mutant"), "Right"}
    return {name: tests for name, tests in caught_by.items() if name in names}


def without(left_out: AbstractSet[str], caught_by: CaughtBy, request: pytest.FixtureRequest) -> CaughtBy:
    """Return ``caught_by`` without some tests, unless all samples are taken or only they catch a mutant of this run."""
    mutants = {name: tests for name, tests in asked(request, caught_by).items() if name != "Right"}
    if takes_all(request.config) or any(tests <= left_out for tests in mutants.values()):
        return caught_by
    return {name: tests - left_out for name, tests in caught_by.items()}


def run_mutants(file: Path, caught_by: CaughtBy, request: pytest.FixtureRequest, *more: str) -> Outcomes:
    """Run the right one under all tests that catch a mutant, and each mutant that the tests of this run ask for under
    those that it fails, or all under all tests of all samples.

    ``more`` are options of pytest.
    """
    if takes_all(request.config):
        return run_contract(file, caught_by, {}, *more)
    pairs = [("Right", test) for test in sorted(set().union(*caught_by.values()))]
    pairs += [(name, test) for name, tests in asked(request, caught_by).items() for test in tests]
    return run_contract(file, (), pairs)


def requirements(ended: Iterable[tuple[str, str]], mutant: str) -> set[str]:
    """Return the tests of a mutant, each once for all of its parameters."""
    return {test.partition("[")[0] for name, test in ended if name == mutant}


def assert_fails_where_wrong(
    outcomes: Outcomes,
    mutant: str,
    caught_by: CaughtBy,
    config: pytest.Config,
    skips: AbstractSet[str] = frozenset(),
) -> None:
    """Assert that a mutant fails the requirements that it breaks, and no others that were run.

    ``skips`` are requirements that the contract does not make of this mutant.
    """
    assert {test for name, test in outcomes.failed if name == mutant} == caught_by[mutant]
    passed = {test for name, test in outcomes.passed if name == mutant}
    if mutant == "Right" or takes_all(config):
        right = {test for name, test in outcomes.passed if name == "Right"}
        assert right >= set().union(*caught_by.values())
        assert passed == right - caught_by[mutant] - skips
