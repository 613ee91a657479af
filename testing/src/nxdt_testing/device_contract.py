"""Tests that every device profile must pass; its author subclasses it once.

Example, the whole test file of a plugin::

    from nxdt_testing.device_contract import DeviceContract

    class TestMyDevice(DeviceContract):
        name = "xpu"

        @pytest.fixture
        def profile(self):
            return PROFILE

On a machine without such a device the tests of its operations are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from nxdt_core.distributed.devices import PROFILES, DeviceProfile, current_device, register_profile
from nxdt_testing.contract import no_error

__all__ = ["DeviceContract"]

_PEAK_FLOPS = (1e9, 1e19)
_MEMORY_GIB = (0.1, 1e5)
_BYTES_PER_S = (1e6, 1e15)
"""Bounds that reveal a figure in another unit, such as TFLOP/s, bytes or GB/s."""


class DeviceContract:
    """The tests of a device profile: subclass it, set :attr:`name` and override the fixture ``profile``."""

    name: ClassVar[str]
    """Name of the record: the device type."""

    @pytest.fixture
    def profile(self) -> DeviceProfile:
        """Return the target of the record."""
        raise NotImplementedError("override the fixture 'profile'")

    @pytest.fixture
    def device(self, profile: DeviceProfile) -> Iterator[torch.device]:
        """Return the current device of the type; skip the test on a machine that has none."""
        if not profile.operations.is_available(profile.device_type):
            pytest.skip(f"this machine has no device of the type {profile.device_type!r}")
        before = dict(PROFILES)
        register_profile(profile)
        try:
            yield current_device(profile.device_type)
        finally:
            PROFILES.clear()
            PROFILES.update(before)

    def test_it_is_the_profile_of_its_device_type(self, profile: DeviceProfile) -> None:
        """The record has the name of the type, by which ``trainer.accelerator`` selects it."""
        assert isinstance(profile, DeviceProfile), (
            f"the target must be a DeviceProfile itself; it is a {type(profile).__name__}"
        )
        assert profile.device_type == self.name, (
            f"the record is called {self.name!r}, and its profile is of the device type {profile.device_type!r}"
        )

    def test_it_says_what_a_run_needs(self, profile: DeviceProfile) -> None:
        """The backend of its process groups, how it is compiled for, and what to install where it is not found."""
        for field in ("process_group_backend", "compile_backend", "install"):
            text = getattr(profile, field)
            assert isinstance(text, str), f"{field} must be text; it is {text!r}"
            assert text.strip(), f"{field} is empty"

    def test_its_figures_have_the_units_of_their_fields(self, profile: DeviceProfile) -> None:
        """FLOP/s, GiB, and bytes per second."""
        for product, table in profile.peak_flops.items():
            for dtype, figure in table.items():
                _assert_between(f"peak_flops[{product!r}][{dtype!r}]", figure, _PEAK_FLOPS, "FLOP/s")
        for product, figure in profile.memory_gib.items():
            _assert_between(f"memory_gib[{product!r}]", figure, _MEMORY_GIB, "GiB")
        for product, links in profile.links.items():
            assert links.processes >= 1, f"links[{product!r}].processes is {links.processes}; a machine has at least 1"
            for side in ("inside", "outside"):
                figure = getattr(links, side)
                _assert_between(f"links[{product!r}].{side}", figure, _BYTES_PER_S, "bytes per second")

    def test_its_dtypes_are_named_as_in_torch(self, profile: DeviceProfile) -> None:
        """``bfloat16`` and not ``bf16``: other names are never looked up."""
        named = {dtype for table in profile.peak_flops.values() for dtype in table}
        named |= {*profile.block_attention, *profile.grouped_products, *(profile.shared_heads or ())}
        wrong = sorted(name for name in named if not isinstance(getattr(torch, name, None), torch.dtype))
        assert not wrong, f"torch has no dtype {', '.join(wrong)}; write it as torch does, such as bfloat16"

    def test_its_tables_name_the_same_products(self, profile: DeviceProfile) -> None:
        """`nxdt plan --device` takes the names of ``memory_gib``, and looks up connections by the same name."""
        strangers = sorted(profile.links.keys() - profile.memory_gib.keys())
        assert not strangers, f"links has {', '.join(strangers)}, which memory_gib has not"

    def test_it_says_whether_this_machine_has_such_a_device(self, profile: DeviceProfile) -> None:
        """Every start of a run asks, also on machines without one."""
        with no_error("is_available must return a bool on every machine; it raised"):
            available = profile.operations.is_available(profile.device_type)
        assert isinstance(available, bool), f"is_available must return a bool; it returned {available!r}"

    def test_its_operations_answer(self, profile: DeviceProfile, device: torch.device) -> None:
        """Index, name and sizes of memory, or None where the device has none."""
        operations = profile.operations
        operations.synchronize(device)
        index = operations.current_index()
        assert index is None or isinstance(index, int), f"current_index must be an int or None; it is {index!r}"
        name = operations.name(device)
        assert name is None or isinstance(name, str), f"name must be text or None; it is {name!r}"
        generation = operations.generation(device)
        right = generation is None or isinstance(generation, int)
        assert right, f"generation must be a major compute capability or None; it is {generation!r}"
        operations.reset_max_memory(device)
        for method, size in (
            ("total_memory_bytes", operations.total_memory_bytes(device)),
            ("max_memory_bytes", operations.max_memory_bytes(device)),
        ):
            right = size is None or (isinstance(size, int) and size >= 0)
            assert right, f"{method} must be a number of bytes or None; it is {size!r}"

    def test_its_generator_is_restored(self, profile: DeviceProfile, device: torch.device) -> None:
        """A resumed run draws the numbers of one that was not stopped."""
        state = profile.operations.rng_state(device)
        if state is None:
            pytest.skip("it has no generator")
        saved = state.clone()
        first = torch.rand(8, device=device)
        torch.rand(8, device=device)
        profile.operations.set_rng_state(saved, device)
        again = torch.rand(8, device=device)
        assert torch.equal(first, again), "after set_rng_state the device draws other numbers than after rng_state"


def _assert_between(name: str, figure: float, bounds: tuple[float, float], unit: str) -> None:
    right = math.isfinite(figure) and bounds[0] <= figure <= bounds[1]
    assert right, f"{name} is {figure:g} {unit}, which no device has; the unit of the field is {unit}"
