"""Fixtures that tests of the core and of plugins share, and the seed of what is sampled."""

from datetime import date

pytest_plugins = ["nxdt_core.testing.s3_server"]


def pytest_report_header() -> str:
    """Said here, since the processes that share the tests say nothing of their own."""
    return f"samples: by the seed {date.today().toordinal()}, the date's, where no option gives another"
