"""One mesh per run: the process groups and device meshes of its parallel dimensions, by name.

All of them are cut out of one mesh over the world, so that DTensor and FSDP2 can join any of them. Neighbouring ranks
are tensor parallel; context, expert and data parallelism follow, and pipeline stages are the farthest apart.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nxdt_core.distributed.torch_versions import set_group_timeout, unflatten
from nxdt_core.protocols.mesh import MeshSizes

Dimension = Literal[
    "world",
    "pp",
    "dp_replicate",
    "dp_shard",
    "cp",
    "tp",
    "ep",
    "fsdp",
    "efsdp",
    "dp",
    "tp_kv",
    "tp_kv_replica",
    "token_shuffle",
]
"""``fsdp`` is ``dp_shard`` x ``cp``, the ranks that ZeRO shards over; ``efsdp`` is what ``ep`` leaves of it; ``dp`` is
``dp_replicate`` x ``dp_shard`` (a size and a rank, no group). ``tp_kv`` x ``tp_kv_replica`` is ``tp`` cut in two where
there are fewer key and value heads than tensor parallel ranks: neighbours hold copies of one head. ``token_shuffle``
are neighbours along ``dp_shard`` that exchange tokens before experts."""

_DENSE = ("pp", "dp_replicate", "fsdp", "tp")
_SPARSE = ("pp", "dp_replicate", "efsdp", "ep", "tp")


class ParallelMesh:
    """The position of this process along each dimension, and the processes it communicates with there."""

    def __init__(
        self, sizes: MeshSizes, root: DeviceMesh | None, *, rank: int = 0, timeout_s: float | None = None
    ) -> None:
        """``root``: one-dimensional, over the world; None for a single process without a process group."""
        self.sizes = sizes
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._rank = rank
        self._root = root
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        self._shuffled = 1
        self._dense = None if root is None else _cut(root, _DENSE, sizes)
        if root is not None and self._dense is not None:
            self._meshes["world",] = root
            self._keep(self._dense, ("dp_replicate", "fsdp"))
            # All cuts are made here, on every rank: groups made later by some ranks only would hang.
            if sizes.cp > 1:
                self._keep(unflatten(self._dense, "fsdp", (sizes.dp_shard, sizes.cp), ("dp_shard", "cp")))
            if sizes.ep > 1:
                self._keep(_cut(root, _SPARSE, sizes), ("ep", "tp"), ("dp_replicate", "efsdp"))
            self._meshes.setdefault(("efsdp",), self._meshes["fsdp",])

    @classmethod
    def build(cls, sizes: MeshSizes, device_type: str, *, timeout_s: float | None = None) -> ParallelMesh:
        """Return the mesh of a run. Needs the default process group, unless the world is one process.

        Collective: every rank calls it with the same sizes.

        Args:
            sizes: number of ranks along each dimension.
            device_type: type of every rank's device, such as ``cuda``.
            timeout_s: longest wait within one collective of any of its groups. Torch gives new groups its own default,
                10 minutes with NCCL and 30 with gloo, instead of that of the default group.
        """
        if not dist.is_initialized():
            return cls(sizes, None)
        root = init_device_mesh(device_type, (sizes.world_size,), mesh_dim_names=("world",))
        return cls(sizes, root, rank=dist.get_rank(), timeout_s=timeout_s)

    def size(self, dim: Dimension) -> int:
        """Ranks along ``dim``; ``tp_kv`` and ``tp_kv_replica`` need :meth:`split_tp` before, ``token_shuffle``
        :meth:`split_dp`."""
        if dim == "world":
            return self.sizes.world_size
        if dim in ("tp_kv", "tp_kv_replica"):
            return self._kv_split()[dim == "tp_kv_replica"]
        if dim == "token_shuffle":
            return self._shuffled
        return int(getattr(self.sizes, dim))

    def rank(self, dim: Dimension) -> int:
        """Return this process's coordinate along ``dim``."""
        sizes, rest = self.sizes, self._rank
        if dim == "world":
            return rest
        rest, tp = divmod(rest, sizes.tp)
        rest, fsdp = divmod(rest, sizes.fsdp)
        pp, replicate = divmod(rest, sizes.dp_replicate)
        dp_shard, cp = divmod(fsdp, sizes.cp)
        efsdp, ep = divmod(fsdp, sizes.ep)
        if dim in ("tp_kv", "tp_kv_replica"):
            return divmod(tp, self._kv_split()[1])[dim == "tp_kv_replica"]
        return {
            "pp": pp,
            "dp_replicate": replicate,
            "dp_shard": dp_shard,
            "cp": cp,
            "tp": tp,
            "fsdp": fsdp,
            "ep": ep,
            "efsdp": efsdp,
            "dp": replicate * sizes.dp_shard + dp_shard,
            "token_shuffle": dp_shard % self._shuffled,
        }[dim]

    def split_tp(self, kv_heads: int) -> None:
        """Cut ``tp`` into ``kv_heads`` groups of ranks that hold one head each. Collective."""
        replicas = self.sizes.tp // kv_heads
        assert kv_heads * replicas == self.sizes.tp, f"{kv_heads} heads over {self.sizes.tp} ranks"
        if self._dense is not None and ("tp_kv", "tp_kv_replica") not in self._meshes:
            split = unflatten(self._dense, "tp", (kv_heads, replicas), ("tp_kv", "tp_kv_replica"))
            self._keep(split, ("tp_kv", "tp_kv_replica"))

    def split_dp(self, ranks: int) -> None:
        """Cut ``dp_shard`` into groups of ``ranks`` neighbours that exchange tokens. Collective."""
        sizes = self.sizes
        assert sizes.dp_shard % ranks == 0, f"{sizes.dp_shard} ranks in groups of {ranks}"
        if self._dense is not None and self._shuffled != ranks:
            names = ("token_groups", "token_shuffle", "token_cp")
            self._keep(unflatten(self._dense, "fsdp", (sizes.dp_shard // ranks, ranks, sizes.cp), names))
        self._shuffled = ranks

    def mesh(self, *dims: Dimension) -> DeviceMesh:
        """Return the device mesh over ``dims``, for DTensor and ``fully_shard``: one dimension, ``dp_replicate, fsdp``,
        ``ep, tp`` or ``tp_kv, tp_kv_replica``.

        Raises:
            KeyError: there is none: one process without a process group, or a dimension of size 1 that is never cut.
        """
        return self._meshes[dims]

    def group(self, dim: Dimension) -> dist.ProcessGroup | None:
        """Return the process group along ``dim``; None where it has one rank."""
        if self.size(dim) == 1 or self._root is None:
            return None
        return self._meshes[dim,].get_group()

    def _keep(self, mesh: DeviceMesh, *pairs: tuple[Dimension, Dimension]) -> None:
        for name in mesh.mesh_dim_names or ():
            self._meshes.setdefault((name,), mesh[name])
            if self._timeout is not None:
                set_group_timeout(self._timeout, mesh[name].get_group())
        for pair in pairs:
            self._meshes[pair] = mesh[pair]

    def _kv_split(self) -> tuple[int, int]:
        shape = self._meshes["tp_kv", "tp_kv_replica"].shape if self.sizes.tp > 1 else (1, 1)
        return shape[0], shape[1]


def _cut(root: DeviceMesh, dims: tuple[str, ...], sizes: MeshSizes) -> DeviceMesh:
    return unflatten(root, "world", tuple(getattr(sizes, dim) for dim in dims), dims)
