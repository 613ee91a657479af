"""All plugins that are installed, and fixtures of the core's tests that the tests of this plugin use, too."""

from __future__ import annotations

import pytest

from nxdt_core.kernel import Kernel
from tests.checkpoint.poison import builder, little_memory, marker
from tests.cli.conftest import dist, nxdt, site, work
from tests.train.conftest import metric_rows, small_run, weights

__all__ = ["builder", "dist", "little_memory", "marker", "metric_rows", "nxdt", "site", "small_run", "weights", "work"]


@pytest.fixture(scope="session")
def installed() -> Kernel:
    """All plugins that are installed."""
    return Kernel.start()
