from __future__ import annotations

from pathlib import Path

import pytest

from nxdt_core.kernel import Kernel, PluginPolicy

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def installed() -> Kernel:
    """All plugins that are installed."""
    return Kernel.start()


@pytest.fixture(scope="session")
def complete(installed: Kernel) -> Kernel:
    """The same, and stand-ins for those that are not part of this version."""
    return Kernel.start(PluginPolicy(local=(HERE / "later.py",), prefer=("later",)))
