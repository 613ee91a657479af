"""Groups of the mesh: how long their collectives wait."""

import warnings

import pytest
import torch
from nxdt_testing.ranks import process_group

from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.protocols.mesh import MeshSizes

GROUPS = [
    (MeshSizes(tp=2), ("world", "tp", "tp_kv")),
    (MeshSizes(pp=2), ("pp",)),
    (MeshSizes(dp_shard=2), ("fsdp", "token_shuffle")),
    (MeshSizes(dp_replicate=2), ("dp_replicate",)),
    (MeshSizes(cp=2), ("cp", "fsdp")),
    (MeshSizes(dp_shard=2, ep=2), ("ep",)),
]


def limits_s(sizes, dims):
    """Return the longest wait within one collective of each group, which no rank warns of."""
    with process_group(timeout_s=300), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        mesh = ParallelMesh.build(sizes, "cpu", timeout_s=77)
        if "tp_kv" in dims:
            mesh.split_tp(2)
        if "token_shuffle" in dims:
            mesh.split_dp(2)
        backends = [mesh.group(dim)._get_backend(torch.device("cpu")) for dim in dims]
        return [backend.options._timeout.total_seconds() for backend in backends]


@pytest.mark.parametrize(("sizes", "dims"), GROUPS, ids=lambda value: "-".join(value) if type(value) is tuple else "")
def test_collectives_of_every_group_wait_as_long_as_the_configuration_says(ranks, sizes, dims):
    """Torch gives a group that is made without a limit its own: 30 minutes, with NCCL 10."""
    assert ranks(2).run(limits_s, sizes, dims, timeout_s=50) == [[77.0] * len(dims)] * 2
