from __future__ import annotations

import pytest

from nxdt_core.kernel import Kernel


@pytest.fixture(scope="session")
def installed() -> Kernel:
    """All plugins that are installed."""
    return Kernel.start()
