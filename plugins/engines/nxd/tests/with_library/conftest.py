"""Tests here train on the real library, which is not installed by default: they skip and say how to run them."""

import importlib.util
from pathlib import Path

import pytest

REASON = "needs a source tree of neuronx-distributed: make test-nxd NXD=FOLDER (an environment with torch 2.9, minutes)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("neuronx_distributed") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=REASON))
