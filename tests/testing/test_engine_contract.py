"""The engine on stock torch, and the one of ``examples/one_process_engine``, keep the contract of engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxdt_core.testing.engine_contract import EngineContract
from tests.sampling import takes_all

SOLO = Path(__file__).with_name("solo_parts.py")


class TestTorch(EngineContract):
    """By default two layouts that share no code path: the matrix of ``tests/parallel`` runs all of them."""

    engine = "torch"

    def runs(self, capability: str, config: pytest.Config) -> bool:
        """All layouts where all samples are taken."""
        return capability in ("zero2", "sp") or takes_all(config)


class TestSolo(EngineContract):
    """From its source: ``tests/packaging`` runs it from a wheel."""

    engine = "solo"
    plugins = (str(SOLO),)
