"""The environment of all tests, the fixtures that tests of the core and of plugins share, and the seed of samples.

``make test``, plain ``pytest PATH`` and the workers of pytest-xdist all load this file first, so all run with the same
settings: one thread per process, unless the caller sets ``OMP_NUM_THREADS``, and text in UTF-8.
"""

import locale
import os
from datetime import date

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch; child processes inherit it
os.environ["LC_ALL"] = "C.UTF-8"  # for what tests read from pipes; tests/cli/test_encodings.py tries other encodings
locale.setlocale(locale.LC_ALL, "")

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
