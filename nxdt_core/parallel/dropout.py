"""Which ranks drop the same elements: those that hold the same values, and no others.

Tensor parallel ranks hold the same hidden states outside the tensor blocks and must drop the same elements of them.
Inside the blocks, and everywhere under sequence parallelism, each rank has different values. Data and context parallel
ranks never hold the same tokens, and two modules never drop the same elements. Masks of hidden states are drawn by
position, and each rank takes its part of them.
"""

from __future__ import annotations

import hashlib
from functools import partial

from torch import nn

from nxdt_core.nn.patterns import matches_any
from nxdt_core.nn.random.dropout import Dropout
from nxdt_core.nn.random.dropout_masks import MaskPart, encoded_name, whole_sequence
from nxdt_core.parallel.context.zigzag import runs_of
from nxdt_core.parallel.mesh import ParallelMesh
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["salt_dropouts"]

_SALT_BITS = 62


def salt_dropouts(module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, *, sequence_parallel: bool) -> None:
    """Fill the slots ``salt`` and ``part`` of the modules that have them (:mod:`nxdt_core.nn.random.dropout`).

    Args:
        module: one pipeline stage, whose paths are those of the whole model; changed in place.
        plan: names the tensor blocks.
        mesh: of the run; in one process there are no salts.
        sequence_parallel: activations outside the tensor blocks are cut along the sequence.
    """
    tokens = mesh.rank("dp"), mesh.rank("cp")
    for path, part in module.named_modules():
        if not hasattr(part, "salt"):
            continue
        inside = any(matches_any(plan.tensor_blocks, outer) for outer in _upwards(path))
        if isinstance(part, Dropout) and not part.dispatched:
            part.part = _part(path, part, mesh, cut=inside and not part.whole)
        if mesh.sizes.world_size == 1:
            continue
        own = (sequence_parallel or inside) and not getattr(part, "whole", False)
        name = "\0".join(map(str, (path, *tokens, mesh.rank("tp") if own else "all")))
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        part.salt = int.from_bytes(digest, "little") >> (64 - _SALT_BITS)


def _part(path: str, dropout: Dropout, mesh: ParallelMesh, *, cut: bool) -> MaskPart:
    cp, tp = mesh.size("cp"), mesh.size("tp")
    return MaskPart(
        name=encoded_name(path),
        shards=cp,
        runs=partial(runs_of, mesh.rank("cp"), cp) if cp > 1 else whole_sequence,
        sequence_parts=(mesh.rank("tp"), tp),
        features=dropout.features,
        feature_parts=(mesh.rank("tp"), tp) if cut and dropout.features is None else (0, 1),
    )


def _upwards(path: str) -> list[str]:
    """``a.b.c``, ``a.b``, ``a``."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
