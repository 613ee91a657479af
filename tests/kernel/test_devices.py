"""The device table: what it says, and what it says of devices that it does not list."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from nxdt_core.devices import HOST, PROFILES, current_device, max_memory_bytes, peak_flops, profile_of
from nxdt_core.errors.launch import AcceleratorMissing, UnknownAccelerator
from nxdt_core.nn.loss.cross_entropy import cross_entropy_sum
from nxdt_core.nn.norm import RMSNorm


def test_each_row_stands_under_its_own_type():
    assert all(profile.device_type == name for name, profile in PROFILES.items())


def test_exactly_one_type_lies_in_the_hosts_memory():
    assert [profile.device_type for profile in PROFILES.values() if profile.host] == [HOST.type]


def test_the_host_has_no_peak_and_a_resident_set():
    assert peak_flops(HOST, "float32") is None
    assert max_memory_bytes(HOST) > 2**20


def test_an_unlisted_type_is_promised_nothing():
    profile = profile_of(torch.device("meta"))
    promises = (profile.host, profile.cache_bound_kernels, profile.fused_optimizers, bool(profile.peak_flops))
    assert promises == (False, False, False, False)


def test_building_blocks_work_on_a_device_that_the_table_does_not_list():
    with torch.device("meta"):
        hidden = torch.ones(2, 8, requires_grad=True)
        labels = torch.zeros(2, dtype=torch.int64)
        loss, weight = cross_entropy_sum(RMSNorm(8)(hidden), labels)
        loss.backward()
    assert (loss.shape, weight.shape, hidden.grad.shape) == ((), (), (2, 8))


def test_the_norm_takes_the_stock_operator_where_kernels_are_not_bound_by_the_cache(monkeypatch):
    calls = []
    stock = functional.rms_norm
    monkeypatch.setattr(functional, "rms_norm", lambda *args: calls.append(1) or stock(*args))
    RMSNorm(8)(torch.ones(2, 8))
    assert calls == []
    RMSNorm(8).to("meta")(torch.ones(2, 8, device="meta"))
    assert calls == [1]


def test_the_current_device_is_one_of_the_table():
    assert current_device().type in PROFILES
    assert current_device(HOST.type, index=3) == HOST


def test_an_accelerator_that_nobody_knows_is_refused():
    with pytest.raises(UnknownAccelerator):
        current_device("abacus")


def test_an_accelerator_that_is_not_here_is_refused():
    absent = next(name for name in PROFILES if name not in {HOST.type, current_device().type})
    with pytest.raises(AcceleratorMissing):
        current_device(absent)
