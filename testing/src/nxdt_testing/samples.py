"""The option ``--samples`` of pytest, which the kits read: a plugin of pytest that installing this package adds."""

from __future__ import annotations

from datetime import date

import pytest

__all__ = ["pytest_addoption"]


def _seed(option: str) -> str:
    """Return ``all`` or the seed that an option means: ``today`` is the number of the date."""
    return str(date.today().toordinal()) if option == "today" else option


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--samples",
        type=_seed,
        metavar="all|today|SEED",
        help="cases to take of tests that have too many: all, or a sample by the date or a seed",
    )
