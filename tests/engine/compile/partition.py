"""Layers that are compiled as inductor partitions their graphs, without its kernels: what they keep for backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from nxdt_core.distributed.devices import PROFILES

__all__ = ["Kept", "Partition"]


class Partition:
    """A backend of ``torch.compile``."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []
        """Operators of each graph, forward and backward."""
        self.backend: Any = aot_autograd(
            fw_compiler=self._run,
            bw_compiler=self._run,
            partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
            decompositions=_decompositions,
        )

    @contextmanager
    def on_cpu(self) -> Iterator[None]:
        """Compile with it on the CPU within the block."""
        torch._dynamo.reset()
        with patch.dict(PROFILES, {"cpu": replace(PROFILES["cpu"], compile_backend=self.backend)}):
            yield
        torch._dynamo.reset()

    def _run(self, graph: GraphModule, _: object) -> Any:
        self.graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)


def _decompositions() -> Any:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


@dataclass
class Kept:
    """What autograd saves within :meth:`counting`; storages count once."""

    known: list[torch.Tensor]
    """Tensors that are not counted."""
    found: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count within the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    @property
    def size(self) -> int:
        """Bytes."""
        known = {_storage(tensor)._cdata for tensor in self.known}
        return sum(storage.nbytes() for key, storage in self.found.items() if key not in known)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        self.found[storage._cdata] = storage
        return tensor


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()
