"""The format ``neuronx`` keeps what nxdt asks of every checkpoint format."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from nxdt_plugin_migrate.checkpoint.format import NeuronxFormat
from nxdt_testing.format_contract import FormatContract

from nxdt_core.protocols.model import ModelBuilder
from plugins.migration.nxd.tests.nxd_writer import Written
from tests.checkpoint.poison import weights


class TestNeuronxFormat(FormatContract):
    @pytest.fixture
    def format(self) -> NeuronxFormat:
        return NeuronxFormat()

    @pytest.fixture
    def builder(self, builder: ModelBuilder) -> ModelBuilder:
        """That of conftest.py."""
        return builder

    @pytest.fixture
    def source(self, tmp_path: Path, written: Path) -> Path:
        return Path(shutil.copytree(written, tmp_path / written.name))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "xser"])
def written(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    cut = Written(heads=4, kv_heads=2, tp=2, pp=2, dp=1, xser=request.param)
    return cut.write(tmp_path_factory.mktemp("written") / "tag.ckpt", weights(), 2)
