"""The frozen weights below an adapter: which they are, by a digest that every layout agrees on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import chain
from weakref import WeakKeyDictionary

import numpy as np
import torch

from nxdt_core.distributed.placement import piece_of
from nxdt_core.protocols.parallel.model import ParallelModel
from nxdt_core.protocols.parallel.piece import Piece
from nxdt_core.protocols.parallel.ranks import RankAgreement

__all__ = ["Sample", "base_digest", "digest_of", "samples_of", "trained_parameters", "without_base"]

_SAMPLES = 8
"""Elements of each parameter that a digest sees, evenly spaced. Training changes nearly all; a digest of all of a large
model would take minutes."""

Sample = tuple[str, int, int]
"""Parameter, number of the sample, and the element's bits in bfloat16, which all dtypes of one model agree on."""

_digests: WeakKeyDictionary[ParallelModel, str] = WeakKeyDictionary()


def trained_parameters(model: ParallelModel) -> frozenset[str]:
    """Return the names of this rank's parameters that are not frozen."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def without_base(model: ParallelModel, weights: Mapping[str, torch.Tensor | Piece]) -> dict[str, torch.Tensor | Piece]:
    """Return those of ``weights`` that train."""
    trained = trained_parameters(model)
    return {name: weight for name, weight in weights.items() if name in trained}


def base_digest(model: ParallelModel, ranks: RankAgreement) -> str:
    """Digest of the frozen weights, equal on all ranks and in every layout. Collective; computed once a model, after
    its base has its weights."""
    known = _digests.get(model)
    if known is None:
        trained, held = trained_parameters(model), model.state_dict()
        names = [name for name, _ in model.named_parameters() if name not in trained]
        own = list(samples_of((name, held[name]) for name in names))
        known = _digests[model] = digest_of(chain.from_iterable(ranks.all_gather_object(own)))
    return known


def digest_of(samples: Iterable[Sample]) -> str:
    """Return a digest of samples, in any order, with repeated ones counted once."""
    text = "\n".join(f"{name}\0{number}\0{bits}" for name, number, bits in sorted(set(samples)))
    return hashlib.sha256(text.encode()).hexdigest()


def samples_of(weights: Iterable[tuple[str, torch.Tensor | Piece]]) -> Iterable[Sample]:
    """Return the samples in this rank's pieces; the host waits for the device once."""
    places: list[tuple[str, int]] = []
    found: list[torch.Tensor] = []
    for name, weight in weights:
        piece = piece_of(weight, name)
        elements = int(np.prod(piece.shape))
        for number in range(_SAMPLES):
            flat = number * (elements - 1) // (_SAMPLES - 1)
            index = np.unravel_index(flat, piece.shape)
            local = tuple(int(at) - start for at, start in zip(index, piece.box.offsets, strict=True))
            if all(0 <= at < size for at, size in zip(local, piece.box.shape, strict=True)):
                places.append((name, number))
                found.append(piece.tensor[local].detach().bfloat16())
    bits = torch.stack(found).view(torch.int16).tolist() if found else []
    return [(name, number, value) for (name, number), value in zip(places, bits, strict=True)]
