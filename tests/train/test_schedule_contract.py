"""Every built-in learning-rate schedule keeps what nxdt asks of all."""

from __future__ import annotations

import pytest
from nxdt_testing.schedule_contract import ScheduleContract

from nxdt_core.builtins import nxdt_schedules
from nxdt_core.config.section import REQUIRED, keys_of
from nxdt_core.kernel.discovery import import_reference


class TestBuiltin(ScheduleContract):
    """Each with its defaults, and with a warm-up of ten steps where it has one."""

    @pytest.fixture(params=nxdt_schedules(), ids=lambda record: record.name)
    def record(self, request):
        return request.param

    @pytest.fixture
    def factory(self, record):
        return import_reference(record.target)

    @pytest.fixture
    def section(self, record):
        cls = import_reference(record.config)
        keys = keys_of(cls)
        needed = {name for name, key in keys.items() if key.default is REQUIRED}
        return cls(**dict.fromkeys(needed | ({"warmup_steps"} & keys.keys()), 10))
