"""The built-in format ``hf`` keeps what nxdt asks of every checkpoint format."""

from __future__ import annotations

from pathlib import Path

import pytest
from nxdt_testing.format_contract import FormatContract

from nxdt_core.hf import HFFormat
from nxdt_core.hf.directory import save_hf
from nxdt_core.protocols.model import ModelBuilder


class TestHFFormat(FormatContract):
    @pytest.fixture
    def format(self) -> HFFormat:
        return HFFormat()

    @pytest.fixture
    def source(self, tmp_path: Path, builder: ModelBuilder) -> Path:
        model = builder.build()
        save_hf(tmp_path / "model", builder, dict(model.named_parameters()))
        return tmp_path / "model"

    @pytest.fixture
    def builder(self, builder: ModelBuilder) -> ModelBuilder:
        """That of conftest.py."""
        return builder
