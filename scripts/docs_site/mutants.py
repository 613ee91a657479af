"""The page of mutants, from the data of the kits' own tests."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["mutants_page"]

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = _ROOT / "tests"
_BETWEEN = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Between the words of the name of a class; those of ``RaisesYAMLError`` are three."""


def mutants_page() -> str:
    """Return the page: kind, requirement, and the deliberately wrong components that it catches."""
    lines = [
        "# What the kits catch",
        "",
        "Each conformance kit is proved by mutants: components with one mistake that a real author could make. This is",
        "the data of the kits' own tests, which fail where a mutant is not caught by the requirements named here.",
        "",
    ]
    for kind, caught_by in _tables():
        by_requirement: dict[str, list[str]] = {}
        for mutant, tests in caught_by.items():
            for test in [tests] if isinstance(tests, str) else sorted(tests):
                by_requirement.setdefault(test, []).append(mutant)
        lines += [f"## {kind}", "", "| Requirement | Caught mutants |", "|---|---|"]
        lines += [f"| {_words(test)} | {', '.join(map(_words, names))} |" for test, names in by_requirement.items()]
        lines.append("")
    return "\n".join(lines)


def _tables() -> Iterator[tuple[str, Mapping[str, Any]]]:
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    files = [*_TESTS.glob("testing/test_*_mutants.py"), *_TESTS.glob("checkpoint/stores/test_*_mutants.py")]
    for file in sorted((*files, _TESTS / "testing/test_engine_contract.py"), key=lambda path: path.name):
        kind = file.stem.removeprefix("test_").removesuffix("_mutants").removesuffix("_contract")
        module = ".".join(file.relative_to(_ROOT).with_suffix("").parts)
        yield kind.replace("_", " ").capitalize(), import_module(module).CAUGHT_BY


def _words(name: str) -> str:
    """A name of a test or class as a sentence."""
    if name.startswith("test_"):
        return name.removeprefix("test_").replace("_", " ")
    words = _BETWEEN.sub(" ", name.replace("NaN", "Nan")).split()
    return " ".join(word if word.isupper() and len(word) > 1 else word.lower() for word in words)
