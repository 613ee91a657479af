"""How the tests of a file of mutants end, each mutant under the test that shall catch it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

__all__ = ["Outcomes", "run_contract"]


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
    file: Path, right: Iterable[str], caught_by: Mapping[str, str] | Iterable[tuple[str, str]]
) -> Outcomes:
    """Run the right ones of a file under all tests, and each mutant under the one that shall catch it, or several."""
    pairs = caught_by.items() if isinstance(caught_by, Mapping) else caught_by
    plugin = Outcomes()
    wanted = [f"{file}::Test{name}" for name in right]
    wanted += [f"{file}::Test{mutant}::{test}" for mutant, test in pairs]
    options = ["-q", "--no-header", "--tb=no", "--show-capture=no", "-r", "", "-p", "no:cacheprovider"]
    pytest.main([*wanted, *options], plugins=[plugin])
    return plugin
