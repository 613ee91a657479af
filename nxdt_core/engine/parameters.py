"""This rank's parameters under their global names; second copies of tied ones kept apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from nxdt_core.distributed.placement import sharded_over
from nxdt_core.engine.mesh import Dimension, ParallelMesh

__all__ = ["StageParameters"]


class StageParameters:
    """Names of the parameters of a rank's stages.

    A pair that is tied is one parameter where both are on one stage. In a pipeline each end has a copy: the rank of
    the last stage keeps its copy under the owner's name, as every other rank keeps the owner. A rank with both ends
    (``zbv``) keeps the owner alone, and its ``twins`` follow it.
    """

    def __init__(self, modules: Sequence[nn.Module], tied: Sequence[tuple[str, str]]) -> None:
        self.by_name: dict[str, nn.Parameter] = {}
        """Global name → what the optimizer trains and checkpoints hold."""
        self.copies: set[str] = set()
        """Names under which this rank has the user's copy only: its elements are counted where the owner is."""
        self.twins: list[tuple[nn.Parameter, nn.Parameter]] = []
        """(owner, user) that are two tensors on this rank."""
        found = {name: p for module in modules for name, p in module.named_parameters(remove_duplicate=False)}
        owner_of = {user: owner for owner, user in tied}
        for name, parameter in found.items():
            owner = owner_of.get(name)
            if owner is None:
                self.by_name[name] = parameter
            elif owner not in found:
                self.by_name[owner] = parameter
                self.copies.add(owner)
            elif found[owner] is not parameter:
                self.twins.append((found[owner], parameter))

    def spoken_for(self, mesh: ParallelMesh) -> list[nn.Parameter]:
        """Return the parameters whose elements this rank counts in sums over all ranks."""
        return [p for name, p in self.by_name.items() if name not in self.copies and owns(p, mesh)]


def owns(tensor: torch.Tensor, mesh: ParallelMesh) -> bool:
    """Return whether this rank is the first of those of its pipeline stage that hold the very same elements.

    Sums over parameters (the gradient's norm) count the owner's elements only.
    """
    cut = sharded_over(tensor)
    tensor_dims: tuple[Dimension, ...] = ("tp_kv_replica",) if "tp_kv" in cut else ("tp",)
    data_dims: tuple[Dimension, ...] = ("efsdp",) if "ep" in cut else ("fsdp",)
    return all(dim in cut or mesh.rank(dim) == 0 for dim in ("dp_replicate", *data_dims, *tensor_dims))
