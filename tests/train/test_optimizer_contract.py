"""Every built-in optimizer keeps what nxdt asks of all."""

from __future__ import annotations

import pytest
from nxdt_testing.optimizer_contract import OptimizerContract

from nxdt_core.builtins import nxdt_optimizers
from nxdt_core.kernel.discovery import import_reference
from tests.sampling import takes_all

BY_NAME = {record.name: record for record in nxdt_optimizers()}


class TestBuiltin(OptimizerContract):
    """Each with its defaults."""

    sharded = True
    rtol = 2e-3  # of Adadelta, which divides by what is near 0

    def tries(self, layout, config):
        """Layouts are compared in the tests of engines, too."""
        return takes_all(config)

    @pytest.fixture(params=[name for name in BY_NAME if name != "rprop"])
    def record(self, request):
        return BY_NAME[request.param]

    @pytest.fixture
    def factory(self, record):
        return import_reference(record.target)

    @pytest.fixture
    def section(self, record):
        return import_reference(record.config)(lr=0.01, weight_decay=0.1)


class TestRprop(TestBuiltin):
    """It follows the rate in its first step alone."""

    reads_rate = False

    @pytest.fixture
    def record(self):
        return BY_NAME["rprop"]
