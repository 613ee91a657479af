"""Which ranks drop the same elements: those that hold the same values, and no others.

Tensor parallel ranks hold the same hidden states outside the tensor blocks and must drop the same elements of them.
Inside the blocks, and everywhere under sequence parallelism, each rank has different values. Data and context parallel
ranks never hold the same tokens, and two modules never drop the same elements. Masks of hidden states and of experts'
rows are drawn by position, and each rank takes its part of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from nxdt_core.engine.context.blocks import zigzag_runs
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.models.moe.dispatch import LocalDispatcher
from nxdt_core.models.patterns import matches_any
from nxdt_core.models.random.dropout import Dropout
from nxdt_core.models.random.dropout_masks import MaskPart, RowPart, TokenNumbers, encoded_name, whole_sequence
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["set_dropout_salts"]

_SALT_BITS = 62


def set_dropout_salts(module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, *, sequence_parallel: bool) -> None:
    """Fill the slots ``salt`` and ``part`` of the modules that have them (:mod:`nxdt_core.models.random.dropout`).

    Args:
        module: one pipeline stage, whose paths are those of the whole model; changed in place.
        plan: names the tensor blocks.
        mesh: of the run; in one process there are no salts.
        sequence_parallel: activations outside the tensor blocks are cut along the sequence.
    """
    _number_tokens(module, TokenNumbers(shards=mesh.size("cp"), runs=_runs(mesh)))
    tokens = mesh.rank("dp"), mesh.rank("cp")
    for path, part in module.named_modules():
        if not hasattr(part, "salt"):
            continue
        inside = any(matches_any(plan.tensor_blocks, outer) for outer in _enclosing_paths(path))
        if isinstance(part, Dropout) and part.dispatched:
            part.part = RowPart(name=encoded_name(path), feature_part=0 if part.whole else mesh.rank("tp"))
        elif isinstance(part, Dropout):
            part.part = _part(path, part, mesh, cut=inside and not part.whole)
        if mesh.sizes.world_size == 1:
            continue
        own = (sequence_parallel or inside) and not getattr(part, "whole", False)
        name = "\0".join(map(str, (path, *tokens, mesh.rank("tp") if own else "all")))
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        part.salt = int.from_bytes(digest, "little") >> (64 - _SALT_BITS)


def _part(path: str, dropout: Dropout, mesh: ParallelMesh, *, cut: bool) -> MaskPart:
    tp = mesh.size("tp")
    return MaskPart(
        name=encoded_name(path),
        shards=mesh.size("cp"),
        runs=_runs(mesh),
        sequence_parts=(mesh.rank("tp"), tp),
        features=dropout.features,
        feature_parts=(mesh.rank("tp"), tp) if cut and dropout.features is None else (0, 1),
    )


def _number_tokens(module: nn.Module, numbers: TokenNumbers) -> None:
    """Fill the slot of the dispatchers whose experts, in the same block, have dropout."""
    drops = [path for path, part in module.named_modules() if isinstance(part, Dropout) and part.dispatched and part.p]
    for path, part in module.named_modules():
        block = path.rpartition(".")[0]
        if isinstance(part, LocalDispatcher) and any(each.startswith(f"{block}.") for each in drops):
            part.numbers = numbers


def _runs(mesh: ParallelMesh) -> Callable[[int], Sequence[int]]:
    cp = mesh.size("cp")
    return partial(zigzag_runs, mesh.rank("cp"), cp) if cp > 1 else whole_sequence


def _enclosing_paths(path: str) -> list[str]:
    """``a.b.c``, ``a.b``, ``a``."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
