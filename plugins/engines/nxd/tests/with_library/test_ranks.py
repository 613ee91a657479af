"""Ranks are where the library puts them, on machines that are not here: compared with the groups that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from nxdt_plugin_nxd.hardware import machine_of_product, position_of
from nxdt_plugin_nxd.translation import MeshCoordinates

from nxdt_core.protocols.mesh import MeshSizes

CASES = {
    "neighbours": ("trn1", 32, {"tp": 8, "dp_shard": 4, "pp": 2}),
    "experts": ("trn1", 32, {"tp": 8, "dp_shard": 8, "ep": 4}),
    "TP 4 on Trn1": ("trn1", 32, {"tp": 4, "dp_shard": 16}),
    "TP 4 and PP 2 on Trn1": ("trn1", 32, {"tp": 4, "dp_shard": 8, "pp": 2}),
    "TP 32 on Trn2": ("trn2", 64, {"tp": 32, "dp_shard": 2, "pp": 2}),
    "TP 64 on Trn2 with LNC 1": ("trn2-lnc1", 128, {"tp": 64, "dp_shard": 2}),
    "TP 32 on half of Trn2": ("trn2", 32, {"tp": 32}),
}


@contextmanager
def processes(count: int) -> Iterator[None]:
    """A process group of so many ranks, of which only this one is here."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_each_rank_is_where_the_library_puts_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from neuronx_distributed.parallel_layers import parallel_state

    product, local, wanted = CASES[case]
    sizes, machine = MeshSizes(**wanted), machine_of_product(product, local)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", machine.platform)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    with processes(sizes.world_size):
        groups = parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tp,
            pipeline_model_parallel_size=sizes.pp,
            expert_model_parallel_size=sizes.ep,
            lnc_size=machine.lnc,
            mesh_only=True,
        )
    places = [MeshCoordinates.of(position_of(rank, sizes, machine), sizes) for rank in range(sizes.world_size)]
    for name, size, found in (
        ("tp", sizes.tp, groups.tp_groups),
        ("dp", sizes.dp, groups.dp_groups),
        ("pp", sizes.pp, groups.pp_groups),
        ("ep", sizes.ep, groups.ep_model_groups),
    ):
        differ = {"dp", "ep"} if name in ("dp", "ep") else {name}
        for group in found:
            indices = [places[rank].as_dict() for rank in group]
            assert [each[name] for each in indices] == list(range(size)), (name, group)
            assert len({tuple(each[key] for key in each.keys() - differ) for each in indices}) == 1, (name, group)
