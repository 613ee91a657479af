"""Every device profile of the core keeps what nxdt asks of all."""

from __future__ import annotations

import pytest
from nxdt_testing.device_profile_contract import DeviceProfileContract

from nxdt_core.builtins.device_profiles import DEVICE_PROFILES
from nxdt_core.kernel.discovery.loading import import_reference

for _record in DEVICE_PROFILES:

    class _Builtin(DeviceProfileContract):
        name, target = _record.name, _record.target

        @pytest.fixture
        def profile(self):
            return import_reference(self.target)

    globals()[f"Test{_record.name}"] = _Builtin
