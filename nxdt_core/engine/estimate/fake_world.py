"""A process group of any size in one process: stock torch's ``fake`` backend, whose collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from nxdt_core.distributed.devices import HOST
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.protocols.parallel.mesh import MeshSizes

__all__ = ["fake_mesh"]

_FAKE = "fake"


@contextmanager
def fake_mesh(sizes: MeshSizes, *, rank: int = 0) -> Iterator[ParallelMesh]:
    """Provide the mesh of a run of ``sizes`` as its process ``rank`` sees it, for tensors of the meta device.

    Raises:
        RuntimeError: this process is in a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a process that trains cannot pretend to be another one: it has a process group")
    dist.init_process_group(
        f"{HOST.type}:{_FAKE},meta:{_FAKE}", rank=rank, world_size=sizes.world_size, store=FakeStore()
    )
    # Two device types have no default among them, which shutting down would complain of.
    assert dist.group.WORLD is not None
    dist.group.WORLD._set_default_backend(dist.Backend.backend_type_map[_FAKE])
    try:
        yield ParallelMesh.build(sizes, HOST.type)
    finally:
        dist.destroy_process_group()
