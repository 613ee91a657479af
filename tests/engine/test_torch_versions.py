"""What differs between versions of torch has one name each, and each fallback does what the newer call does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.ranks import process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nxdt_core.distributed import torch_versions
from nxdt_core.models.moe import experts
from nxdt_core.models.moe.experts import RowGroups


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


def gathered_and_scattered():
    with process_group():
        rank, size = dist.get_rank(), dist.get_world_size()
        whole, part = torch.empty(size * 2), torch.empty(2)
        torch_versions.all_gather_single(whole, torch.tensor([rank, rank + 10.0]))
        torch_versions.reduce_scatter_single(part, torch.arange(size * 2.0) + rank)
        return whole.tolist(), part.tolist()


def test_collectives_gather_and_scatter_in_the_order_of_ranks(ranks):
    first, second = ranks(2).run(gathered_and_scattered)
    assert first == ([0, 10, 1, 11], [1, 3])
    assert second == ([0, 10, 1, 11], [5, 7])


def ranks_of_dimensions(older):
    with process_group():
        root = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        if older and hasattr(DeviceMesh, "_unflatten"):
            del DeviceMesh._unflatten  # in this process, which ends with the test
        dense = torch_versions.unflatten(root, "world", (2, 2), ("data", "tensor"))
        split = torch_versions.unflatten(dense, "tensor", (1, 2), ("head", "copy"))
        return {
            name: dist.get_process_group_ranks(mesh[name].get_group())
            for mesh, names in ((dense, ("data", "tensor")), (split, ("data", "head", "copy")))
            for name in names
        }


@pytest.mark.parametrize("older", [False, True])
def test_a_dimension_is_split_as_ranks_lie(ranks, older):
    assert ranks(4).run(ranks_of_dimensions, older) == [
        {"data": [0, 2], "tensor": [0, 1], "head": [0], "copy": [0, 1]},
        {"data": [1, 3], "tensor": [0, 1], "head": [1], "copy": [0, 1]},
        {"data": [0, 2], "tensor": [2, 3], "head": [2], "copy": [2, 3]},
        {"data": [1, 3], "tensor": [2, 3], "head": [3], "copy": [2, 3]},
    ]


def test_fsdp_states_of_both_kinds_give_their_groups():
    assert torch_versions.fsdp_parameter_groups(SimpleNamespace(_fsdp_param_groups=[1, 2])) == (1, 2)
    assert torch_versions.fsdp_parameter_groups(SimpleNamespace(_fsdp_param_group=1)) == (1,)
    assert torch_versions.fsdp_parameter_groups(SimpleNamespace(_fsdp_param_group=None)) == ()


def test_experts_are_multiplied_one_by_one_where_torch_has_no_grouped_product(monkeypatch):
    rows, weights = torch.randn(6, 8), torch.randn(3, 4, 8)
    counts = torch.tensor([4, 0, 2])
    expected = torch.cat([rows[:4] @ weights[0].T, rows[4:] @ weights[2].T])
    torch.testing.assert_close(experts.grouped_linear(rows, weights, RowGroups(counts)), expected)
    monkeypatch.setattr(experts, "grouped_mm", None)
    torch.testing.assert_close(experts.grouped_linear(rows, weights, RowGroups(counts)), expected)
