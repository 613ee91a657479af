"""Every device profile of the core keeps what nxdt asks of all."""

from __future__ import annotations

import pytest
from nxdt_testing.device_contract import DeviceContract

from nxdt_core.builtins import nxdt_devices
from nxdt_core.kernel.discovery import import_reference

for _record in nxdt_devices():

    class _Builtin(DeviceContract):
        name, target = _record.name, _record.target

        @pytest.fixture
        def profile(self):
            return import_reference(self.target)

    globals()[f"Test{_record.name}"] = _Builtin
