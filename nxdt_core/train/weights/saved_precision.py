"""The weights of a checkpoint in bfloat16 (``checkpoint.save_bf16``), and the wider ones that a resume also needs.

Where a run updates wider weights than bfloat16 (masters, or float32 weights themselves), the section ``model`` gets
them rounded to the nearest, for those who only want a model; the section ``optim`` gets them as they are, under
``<parameter name>/master_weight``, so that a resume is exact.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from dataclasses import replace

import torch

from nxdt_core.checkpoint.format.file_names import MASTER_WEIGHT
from nxdt_core.protocols.parallel.piece import Piece

__all__ = ["round_to_bfloat16", "take_masters"]

Tensors = dict[str, torch.Tensor | Piece]


def round_to_bfloat16(weights: MutableMapping[str, torch.Tensor | Piece], parameters: Collection[str]) -> Tensors:
    """Round those of ``weights`` that are ``parameters`` and wider than bfloat16, in place.

    The rounded ones are 2 bytes per element of new memory on the device, until they are saved.

    Returns:
        What was rounded, as it was, under the names of optimizer state.
    """
    masters: Tensors = {}
    for name, weight in weights.items():
        dtype = (weight.tensor if isinstance(weight, Piece) else weight).dtype
        if name in parameters and dtype.is_floating_point and dtype.itemsize > torch.bfloat16.itemsize:
            masters[f"{name}/{MASTER_WEIGHT}"] = weight
            weights[name] = _rounded(weight)
    return masters


def take_masters(state: MutableMapping[str, torch.Tensor | Piece]) -> Tensors:
    """Take what :func:`round_to_bfloat16` returned out of optimizer state; by name of the parameter."""
    suffix = f"/{MASTER_WEIGHT}"
    return {key.removesuffix(suffix): state.pop(key) for key in list(state) if key.endswith(suffix)}


def _rounded(weight: torch.Tensor | Piece) -> torch.Tensor | Piece:
    if isinstance(weight, Piece):
        return replace(weight, tensor=weight.tensor.bfloat16())
    return weight.bfloat16()
