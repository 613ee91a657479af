"""Every built-in precision policy keeps what nxdt asks of all."""

from __future__ import annotations

from typing import Any

import pytest
from nxdt_testing.precision_contract import PrecisionContract

from nxdt_core.builtins import nxdt_precisions
from nxdt_core.kernel.discovery import import_reference
from nxdt_core.train.precision import BF16SRConfig, ManualConfig

RECORDS = {record.name: record for record in nxdt_precisions()}


SLOW = pytest.mark.slow
"""Others show the same by default."""


def under_contract(name: str, config: Any = None, *, keeps: bool = True) -> type[PrecisionContract]:
    class Contract(PrecisionContract):
        requires = RECORDS[name].requires
        keeps_small_updates = keeps

        @pytest.fixture
        def factory(self):
            return import_reference(RECORDS[name].target)

        @pytest.fixture
        def section(self):
            return config

    return Contract


TestFP32 = under_contract("fp32")
TestAutocast = SLOW(under_contract("autocast"))
TestMixed = SLOW(under_contract("mixed_precision"))
TestMixedSR = under_contract("mixed_precisionSR")
TestBF16SR = under_contract("bf16SR", BF16SRConfig())
TestBF16SRWithNarrowState = SLOW(under_contract("bf16SR", BF16SRConfig(optimizer_state="bfloat16")))
TestManual = SLOW(under_contract("manual", ManualConfig()))
TestManualMasters = SLOW(
    under_contract("manual", ManualConfig(xla_downcast_bf16=True, master_weights=True, fp32_grad_acc=True))
)
TestManualRounded = SLOW(
    under_contract("manual", ManualConfig(xla_downcast_bf16="1", neuron_rt_stochastic_rounding_en="1"))
)
TestManualNarrow = under_contract("manual", ManualConfig(xla_use_bf16="1"), keeps=False)
