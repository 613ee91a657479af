"""Which ranks drop the same elements: those that hold the same values, and no others.

Tensor parallel ranks hold the same hidden states outside of the tensor blocks and must drop the same of them; inside,
and everywhere under sequence parallelism, each has values of its own. Data and context parallel ranks never hold the
same tokens, and two modules never drop alike.
"""

from __future__ import annotations

import hashlib

from torch import nn

from nxdt_core.nn.patterns import matches_any
from nxdt_core.parallel.mesh import ParallelMesh
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["salt_dropouts"]

_SALT_BITS = 62


def salt_dropouts(module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, *, sequence_parallel: bool) -> None:
    """Fill the attribute ``salt`` of the modules that have one (:mod:`nxdt_core.nn.dropout`).

    Args:
        module: one pipeline stage, whose paths are those of the whole model; changed in place.
        plan: names the tensor blocks.
        mesh: nothing is done in one process.
        sequence_parallel: activations outside the tensor blocks are cut along the sequence.
    """
    if mesh.sizes.world_size == 1:
        return
    tokens = mesh.rank("dp"), mesh.rank("cp")
    for path, part in module.named_modules():
        if not hasattr(part, "salt"):
            continue
        block = sequence_parallel or any(matches_any(plan.tensor_blocks, outer) for outer in _upwards(path))
        own = block and not getattr(part, "whole", False)
        name = "\0".join(map(str, (path, *tokens, mesh.rank("tp") if own else "all")))
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        part.salt = int.from_bytes(digest, "little") >> (64 - _SALT_BITS)


def _upwards(path: str) -> list[str]:
    """``a.b.c``, ``a.b``, ``a``."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
