"""Whether a checkpoint fits what the ranks hold, agreed by all of them before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch

from nxdt_core.checkpoint.format.tensor_index import TensorEntry
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.errors.training import OptimizerStateDoesNotFit
from nxdt_core.protocols.parallel.piece import Piece
from nxdt_core.protocols.parallel.ranks import RankAgreement

__all__ = ["Unmatched", "check_model", "check_optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """Names over all ranks that a load which is not strict passed over."""

    missing: list[str] = field(default_factory=list)
    """Parameters that the checkpoint lacks."""
    extra: list[str] = field(default_factory=list)
    """Parameters of the checkpoint that the model lacks."""


def check_model(
    index: Mapping[str, TensorEntry],
    tensors: Mapping[str, torch.Tensor | Piece],
    ranks: RankAgreement | None,
    *,
    strict: bool = True,
) -> Unmatched:
    """Compare the names and whole shapes of ``tensors``, this rank's, with ``index``.

    Collective.

    Raises:
        WeightsDoNotFit: shapes differ; or, if ``strict``, a rank lacks something in the checkpoint, or the checkpoint
            has what no rank asks for; the same on every rank.
    """
    own = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    gathered = [own] if ranks is None else ranks.all_gather_object(own)
    held = dict(chain.from_iterable(each.items() for each in gathered))
    missing = [name for name in held if name not in index]
    extra = [name for name in index if name not in held]
    shapes = [
        f"{name}: {index[name].shape} instead of {shape}"
        for name, shape in held.items()
        if name in index and index[name].shape != shape
    ]
    if shapes or (strict and (missing or extra)):
        raise WeightsDoNotFit(missing=missing, extra=extra, shapes=shapes)
    return Unmatched(missing=missing, extra=extra)


def check_optimizer(
    index: Mapping[str, TensorEntry], parameters: Mapping[str, torch.Tensor | Piece], ranks: RankAgreement | None
) -> None:
    """Check that every parameter with state in ``index`` is on some rank.

    Collective.

    Raises:
        OptimizerStateDoesNotFit: some are on none; the same on every rank.
    """
    own = list(parameters)
    gathered = [own] if ranks is None else ranks.all_gather_object(own)
    held = set(chain.from_iterable(gathered))
    unknown = sorted({key.rpartition("/")[0] for key in index} - held)
    if unknown:
        raise OptimizerStateDoesNotFit(parameters=unknown)
