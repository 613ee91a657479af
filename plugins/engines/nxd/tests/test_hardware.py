"""Layouts that Trainium machines do not run, and where ranks are on them, without the library."""

from __future__ import annotations

import pytest
from nxdt_plugin_nxd.errors import LayoutNotOnHardware
from nxdt_plugin_nxd.hardware import Machine, check_layout, machine_of_product, position_of
from nxdt_testing.errors import raises

from nxdt_core.protocols.mesh import MeshSizes

REFUSED = {
    "three cores": (("trn1", 3), {"dp_shard": 3}, "1, 2, 8, 16 or a multiple of 32"),
    "half a machine and one": (("trn1", 24), {"tp": 8, "dp_shard": 6}, "the run has 48"),
    "groups apart, LNC 2": (("trn2", 64), {"tp": 8, "dp_shard": 8}, "cannot reach one another with LNC 2"),
    "groups apart, LNC 1": (("trn2-lnc1", 128), {"tp": 16, "pp": 8}, "cannot reach one another with LNC 1"),
    "experts on Trn1": (("trn1", 32), {"tp": 4, "dp_shard": 8, "ep": 2}, "distributes no experts"),
    "experts on rings": (("trn2", 64), {"tp": 32, "dp_shard": 2, "ep": 2}, "distributes no experts"),
    "stages within a machine": (("trn1", 32), {"tp": 4, "pp": 8}, "fills whole machines of 32"),
    "half of Trn2": (("trn2", 32), {"tp": 32, "dp_shard": 2}, "needs all 64 processes"),
}
"""Product and processes of a machine, sizes, and what is said."""
ALLOWED = {
    "a chip": (("trn1", 2), {"tp": 2}),
    "half of Trn1": (("trn1", 16), {"tp": 8, "dp_shard": 2}),
    "four machines": (("trn1", 32), {"tp": 32, "dp_shard": 2, "pp": 2}),
    "strided": (("trn1", 32), {"tp": 4, "dp_shard": 8}),
    "a chip of Trn2": (("trn2", 4), {"tp": 4}),
    "neighbours": (("trn2", 64), {"tp": 4, "dp_shard": 16, "ep": 8}),
    "rings": (("trn2", 64), {"tp": 32, "pp": 8, "dp_shard": 4}),
    "one group of eight": (("trn2", 8), {"tp": 8}),
    "Trn3": (("trn3", 64), {"tp": 8, "dp_shard": 8}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_machine_does_not_run_is_refused(case: str) -> None:
    (product, processes), sizes, words = REFUSED[case]
    with raises(LayoutNotOnHardware, match=words):
        check_layout(MeshSizes(**sizes), machine_of_product(product, processes))


@pytest.mark.parametrize("case", ALLOWED)
def test_what_a_machine_runs_is_not_refused_and_has_a_place_for_each_rank(case: str) -> None:
    (product, processes), wanted = ALLOWED[case]
    sizes, machine = MeshSizes(**wanted), machine_of_product(product, processes)
    check_layout(sizes, machine)
    positions = [position_of(rank, sizes, machine) for rank in range(sizes.world_size)]
    assert sorted(positions) == list(range(sizes.world_size))


def test_four_tensor_parallel_ranks_are_a_quarter_of_trn1_apart() -> None:
    sizes, machine = MeshSizes(tp=4, dp_shard=16), machine_of_product("trn1", 32)
    by_position = sorted(range(64), key=lambda rank: position_of(rank, sizes, machine))
    assert by_position[:8] == [0, 8, 16, 24, 1, 9, 17, 25]
    assert by_position[32:36] == [32, 40, 48, 56]


def test_groups_of_32_run_up_one_row_of_trn2_and_down_another() -> None:
    sizes, machine = MeshSizes(tp=32, dp_shard=2), machine_of_product("trn2", 64)
    by_position = sorted(range(64), key=lambda rank: position_of(rank, sizes, machine))
    assert by_position == [*range(16), *range(48, 64), *range(16, 48)]


def test_the_size_of_a_logical_core_is_that_of_the_runtimes_variables() -> None:
    assert Machine.of("trn1n", 32, {}) == Machine(platform="trn1", lnc=1, processes=32)
    assert Machine.of("trn2", 64, {}).lnc == 2
    assert Machine.of("trn2", 128, {"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}).lnc == 1
    assert Machine.of("trn2", 128, {"NEURON_LOGICAL_NC_CONFIG": "1"}).lnc == 1
