"""Asynchronous tensor parallelism: compiled layers compute with the parts of a tensor that have arrived.

A pass of inductor takes the all-gather before a product, or the reduce-scatter behind one, into the product (Wang et
al. 2023, doi:10.1145/3567955.3567959). Its kernels copy parts between the symmetric memory of the ranks.
"""

from __future__ import annotations

from nxdt_core.engine.mesh import ParallelMesh

__all__ = ["pipeline_collectives"]


def pipeline_collectives(mesh: ParallelMesh) -> None:
    """Let the layers that are compiled from now on pipeline what their tensor parallel ranks exchange.

    Every rank of the group calls it. The switch is torch's, of the process, and part of the key of a cached graph.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    group = mesh.group("tp")
    if group is None:
        return
    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)
