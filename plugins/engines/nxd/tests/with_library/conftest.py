"""Tests here train on the real library, which is not installed by default: they skip and say how to run them."""

import importlib.util

import pytest

REASON = "needs a source tree of neuronx-distributed: make test-nxd NXD=FOLDER (an environment with torch 2.9, minutes)"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Called for the tests of this folder alone."""
    if importlib.util.find_spec("neuronx_distributed") is None:
        item.add_marker(pytest.mark.skip(reason=REASON))
