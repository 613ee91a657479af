"""Dropout over ranks: ranks that hold the same values drop the same elements, and no others do.

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
from nxdt_core.models.patterns import matches_within
from nxdt_core.models.random.dropout import Dropout
from nxdt_core.models.random.dropout_masks import MaskPart, RowPart, TokenNumbers, encoded_name, whole_sequence
from nxdt_core.protocols.plan import ParallelPlan

_SALT_BITS = 62


def set_dropout_salts(module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, *, sequence_parallel: bool) -> None:
    """Set ``salt`` and ``part`` of the modules that have them (:mod:`nxdt_core.models.random.dropout`).

    Args:
        module: one pipeline stage, whose paths are those of the whole model; changed in place.
        plan: names the tensor blocks.
        mesh: says which ranks hold the same values; in one process there are no salts.
        sequence_parallel: activations outside the tensor blocks are cut along the sequence.
    """
    runs, cp = _runs(mesh), mesh.size("cp")
    tensor_part, tokens = (mesh.rank("tp"), mesh.size("tp")), (mesh.rank("dp"), mesh.rank("cp"))
    for path, part in module.named_modules():
        if isinstance(part, LocalDispatcher) and _experts_drop(module, path.rpartition(".")[0]):
            part.numbers = TokenNumbers(shards=cp, runs=runs)
        if not hasattr(part, "salt"):
            continue
        inside = any(matches_within(block, path) for block in plan.tensor_blocks)
        if isinstance(part, Dropout) and part.dispatched:
            part.part = RowPart(name=encoded_name(path), feature_part=0 if part.whole else mesh.rank("tp"))
        elif isinstance(part, Dropout):
            part.part = MaskPart(
                name=encoded_name(path),
                shards=cp,
                runs=runs,
                sequence_parts=tensor_part,
                features=part.features,
                feature_parts=tensor_part if inside and not part.whole and part.features is None else (0, 1),
            )
        if mesh.sizes.world_size == 1:
            continue
        by_rank = (sequence_parallel or inside) and not getattr(part, "whole", False)
        name = "\0".join(map(str, (path, *tokens, mesh.rank("tp") if by_rank else "all")))
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        part.salt = int.from_bytes(digest, "little") >> (64 - _SALT_BITS)


def _experts_drop(module: nn.Module, block: str) -> bool:
    """Return whether experts in the module at ``block`` have dropout."""
    parts = module.get_submodule(block).modules()
    return any(isinstance(part, Dropout) and part.dispatched and part.p for part in parts)


def _runs(mesh: ParallelMesh) -> Callable[[int], Sequence[int]]:
    cp = mesh.size("cp")
    return partial(zigzag_runs, mesh.rank("cp"), cp) if cp > 1 else whole_sequence
