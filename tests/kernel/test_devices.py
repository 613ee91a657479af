"""The device table: what it says, and what it says of devices that it does not list."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from nxdt_testing.errors import raises
from torch.nn import functional

from nxdt_core.distributed.device_operations import DeviceOperations
from nxdt_core.distributed.devices import HOST, PROFILES, DeviceProfile, current_device, peak_flops, profile_of
from nxdt_core.distributed.process_group import check_devices
from nxdt_core.errors.launch import AcceleratorMissing, UnknownAccelerator
from nxdt_core.errors.ranks import NotEnoughDevices
from nxdt_core.models.loss import cross_entropy_sum
from nxdt_core.models.norm import RMSNorm
from nxdt_core.models.random.dropout import Dropout, _seeded_mask, causal_attention
from nxdt_core.train.state import capture_rng, restore_rng, seed_all


def test_each_row_stands_under_its_own_type():
    assert all(profile.device_type == name for name, profile in PROFILES.items())


def test_exactly_one_type_lies_in_the_hosts_memory():
    assert [profile.device_type for profile in PROFILES.values() if profile.host] == [HOST.type]


def test_the_host_has_no_peak_and_a_resident_set():
    assert peak_flops(HOST, "float32") is None
    assert profile_of(HOST).operations.max_memory_bytes(HOST) > 2**20


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
    with raises(UnknownAccelerator):
        current_device("abacus")


def test_an_accelerator_that_is_not_here_is_refused():
    absent = next(name for name in PROFILES if name not in {HOST.type, current_device().type})
    with raises(AcceleratorMissing):
        current_device(absent)


@contextmanager
def host_as(**fields: object) -> Iterator[None]:
    """The host with another profile."""
    with patch.dict(PROFILES, {HOST.type: replace(PROFILES[HOST.type], **fields)}):
        yield


def test_a_type_without_a_profile_is_asked_nothing():
    """Not even through ``torch.get_device_module``, which raises for it."""
    device = torch.device("xla", 0)
    with pytest.raises(RuntimeError):
        torch.get_device_module(device)
    state = capture_rng(device)
    seed_all(3, device)
    assert "device" not in state
    restore_rng(state, device)
    operations = profile_of(device).operations
    operations.set_index(0)
    operations.synchronize(device)
    figures = operations.max_memory_bytes(device), peak_flops(device, "float32"), operations.current_index()
    assert figures == (None, None, None)


def test_a_run_uses_the_operations_of_the_profile():
    """Index, seed, random numbers and memory of a device whose library does these its own way."""

    class Operations(DeviceOperations):
        """Counts from 5, and keeps one number as its generator."""

        drawn = 0

        def is_available(self, device_type: str) -> bool:
            return device_type == "xla"

        def count(self) -> int:
            return 2

        def current_index(self) -> int:
            return 5

        def seed(self, seed: int) -> None:
            self.drawn = seed

        def rng_state(self, device: torch.device) -> torch.Tensor:
            return torch.tensor([self.drawn])

        def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
            self.drawn = int(state)

        def max_memory_bytes(self, device: torch.device) -> int:
            return 7

    operations = Operations()
    profile = DeviceProfile(device_type="xla", process_group_backend="gloo", operations=operations)
    with patch.dict(PROFILES, {"xla": profile}):
        device = current_device("xla")
        assert device == torch.device("xla", 5)
        seed_all(3, device)
        state = capture_rng(device)
        operations.drawn = 4
        restore_rng(state, device)
        assert (operations.drawn, operations.max_memory_bytes(device)) == (3, 7)
        with raises(NotEnoughDevices, match="3 ranks"):
            check_devices(device, 3, "here")
    with raises(UnknownAccelerator):
        current_device("xla")


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_dropout_can_be_drawn_on_the_host(p):
    """The seeded masks are those that the device of the host draws itself; the rest drops as many and scales them."""
    hidden = torch.ones(4, 64, 64)
    own = Dropout(p)
    with host_as(host_random=True):
        seed_all(1)
        kept = own(hidden)
        seed_all(1)
        assert torch.equal(kept, own(hidden))
        assert kept.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
        assert float((kept == 0).float().mean()) == pytest.approx(p, abs=0.02)
        seeded = _seeded_mask(torch.tensor(9), [8, 8], p, HOST)
    assert torch.equal(seeded, _seeded_mask(torch.tensor(9), [8, 8], p, HOST))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_whose_dropout_is_drawn_on_the_host_is_that_of_the_kernel(masked):
    """With a probability so small that nothing is dropped; grouped heads, and documents in one sequence."""
    query, key, value = (torch.randn(2, heads, 16, 8) for heads in (4, 2, 2))
    documents = torch.arange(16).div(5, rounding_mode="floor").expand(2, 16) if masked else None
    with host_as(host_random=True):
        found = causal_attention(1e-12)(query, key, value, documents)
    torch.testing.assert_close(found, causal_attention(0.0)(query, key, value, documents))
