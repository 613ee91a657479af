"""Fixtures that tests of the core and of plugins share, and the seed of what is sampled."""

from datetime import date

import pytest

pytest_plugins = ["nxdt_core.testing.s3_server"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of :func:`tests.sampling.of_matrix`."""
    parser.addoption(
        "--matrix",
        default=str(date.today().toordinal()),
        metavar="full|SEED",
        help="layouts to run: all, or samples by this seed (default: the date's)",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What to give for the same sample again."""
    terminalreporter.write_line(f"matrix of layouts: --matrix={terminalreporter.config.getoption('--matrix')}")


def pytest_report_header() -> str:
    """Said here, since the processes that share the tests say nothing of their own."""
    return f"samples: by the seed {date.today().toordinal()}, the date's, where no option gives another"
