"""The shared library of the device type of these tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.distributed import building


@pytest.fixture(scope="session")
def abacus_cache(pytestconfig: pytest.Config) -> str:
    """The directory with the device's library, which is built here where it is not there yet."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing, and the device is written in C++")
    assert pytestconfig.cache is not None
    cache = Path(pytestconfig.cache.mkdir("abacus"))
    building.library(cache)
    return str(cache)
