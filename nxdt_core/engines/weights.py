"""Memory and first values of a model that was built on the meta device, for a rank that holds a part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from nxdt_core.nn.random.init import fill, rule_for
from nxdt_core.protocols.initialisation import InitRule
from nxdt_core.protocols.parallel.piece import Piece

__all__ = ["allocate", "draw_piece", "tie"]


def allocate(module: nn.Module, device: torch.device, *, tied: Sequence[tuple[str, str]] = ()) -> None:
    """Give ``module`` memory on ``device``, with the buffers that follow from its configuration.

    Its parameters have undefined values afterwards: draw or load them.

    Args:
        module: on the meta device; a pipeline stage of a model is one.
        device: of the run.
        tied: of the plan.
    """
    module.to_empty(device=device)
    tie(module, tied)
    for part in module.modules():
        reset = getattr(part, "reset_buffers", None)
        if callable(reset):
            reset()


def tie(module: nn.Module, tied: Sequence[tuple[str, str]]) -> None:
    """Make the second parameter of each pair the first; moving off the meta device separates them."""
    present = dict(module.named_parameters(remove_duplicate=False))
    for owner, user in tied:
        if owner in present and user in present:
            path, _, leaf = user.rpartition(".")
            setattr(module.get_submodule(path), leaf, present[owner])


def draw_piece(piece: Piece, name: str, rules: Sequence[InitRule], *, seed: int) -> None:
    """Fill a rank's part of a parameter with its first values, bitwise equal to those elements of the whole.

    They are drawn by name and position, so that no rank draws what another one holds.

    Args:
        piece: this rank's elements and their place in the whole parameter.
        name: the global one; of a tied parameter that of its owner.
        rules: of the builder, those of adapters before them.
        seed: of the run.

    Raises:
        NoInitRule: no rule is for the parameter.
    """
    fill(piece.tensor, rule_for(name, rules), name=name, seed=seed, shape=piece.shape, offsets=piece.box.offsets)
