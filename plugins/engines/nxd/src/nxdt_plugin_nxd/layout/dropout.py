"""Which ranks drop the same elements: those that hold the same values, and no others, as under the torch engine."""

from __future__ import annotations

import hashlib

from torch import nn

from nxdt_core.models.patterns import matches_any
from nxdt_core.models.random.dropout import Dropout
from nxdt_core.models.random.dropout_masks import MaskPart, encoded_name
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_plugin_nxd.layout.placement import MeshCoordinates

__all__ = ["place_dropouts"]

_SALT_BITS = 62


def place_dropouts(module: nn.Module, plan: ParallelPlan, place: MeshCoordinates, *, sequence_parallel: bool) -> None:
    """Fill the slots of the modules of a stage that draw masks (:mod:`nxdt_core.models.random.dropout`).

    Args:
        module: one pipeline stage, whose paths are those of the whole model; changed in place.
        plan: names the tensor blocks.
        place: of this process; in a single process there are no salts.
        sequence_parallel: activations outside the tensor blocks are parts of the sequence.
    """
    for path, part in module.named_modules():
        if not hasattr(part, "salt"):
            continue
        inside = any(matches_any(plan.tensor_blocks, outer) for outer in _upwards(path))
        whole = bool(getattr(part, "whole", False))
        if isinstance(part, Dropout) and not part.dispatched:
            part.part = _part(path, part, place, cut=inside and not whole)
        if place.sizes.world_size > 1:
            own = (sequence_parallel or inside) and not whole
            name = "\0".join(map(str, (path, place.dp, 0, place.tp if own else "all")))
            digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
            part.salt = int.from_bytes(digest, "little") >> (64 - _SALT_BITS)


def _part(path: str, dropout: Dropout, place: MeshCoordinates, *, cut: bool) -> MaskPart:
    tensor_part = place.tp, place.sizes.tp
    return MaskPart(
        name=encoded_name(path),
        sequence_parts=tensor_part,
        features=dropout.features,
        feature_parts=tensor_part if cut and dropout.features is None else (0, 1),
    )


def _upwards(path: str) -> list[str]:
    """``a.b.c``, ``a.b``, ``a``."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
