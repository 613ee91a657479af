"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): momentum made orthogonal, matrix by matrix.

An orthogonal update needs the whole matrix. Each matrix is brought together on one of the ranks that share it, so that
the iterations are shared out over data and tensor parallel ranks; replicas repeat them. The update is that of
``torch.optim.Muon``, for stacks of experts' matrices too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from nxdt_core.distributed.devices import profile_of
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.optimizer import ParameterGroup, as_torch, shards_of
from nxdt_core.train.optimizers.config import MuonConfig
from nxdt_core.train.optimizers.exchange import Exchange
from nxdt_core.train.optimizers.pieces import TrainedPiece, trained_pieces

__all__ = ["Muon", "orthogonal"]

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration, chosen there for the steepest start."""
_EPS = 1e-7

_Groups = tuple[dist.ProcessGroup, ...]


class Muon(torch.optim.AdamW):
    """Orthogonal updates of hidden matrices; AdamW's of everything else."""

    def __init__(self, groups: list[ParameterGroup], config: MuonConfig) -> None:
        super().__init__(as_torch(groups), betas=config.betas, eps=config.eps, fused=False)
        self._config = config
        self._shards = shards_of(groups)
        self._matrices = {
            parameter
            for group in groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
            if self._shards[parameter].matrix and not matches_any(config.adamw_params, name)
        }
        self._exchanges: dict[tuple[_Groups, tuple[int, ...]], Exchange] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        alike: dict[_Groups, list[TrainedPiece]] = {}
        for piece in trained_pieces(self.param_groups, self._shards):
            if piece.parameter in self._matrices:
                alike.setdefault(piece.shard.groups, []).append(piece)
        for pieces in alike.values():
            self._update(pieces)
        super().step()

    def _update(self, pieces: list[TrainedPiece]) -> None:
        """Update matrices that are cut over the same ranks, and take their gradients, so that AdamW leaves them."""
        exchange = self._exchange(pieces)
        for indexes in exchange.rounds():
            updates = {index: self._momentum(pieces[index]) for index in indexes}
            wholes = exchange.gather(updates)
            for index, whole in wholes.items():
                wholes[index] = orthogonal(whole, self._config.ns_steps)
            for index, update in exchange.scatter(wholes, indexes).items():
                self._apply(pieces[index], update)

    def _momentum(self, piece: TrainedPiece) -> torch.Tensor:
        """This rank's elements of the update before it is made orthogonal, in the dtype of the iterations."""
        state: dict[str, torch.Tensor] = self.state[piece.parameter]
        keep = self._config.momentum
        if not state:
            state["momentum_buffer"] = torch.zeros_like(piece.parameter)
        mean = piece.real(state["momentum_buffer"])
        mean.lerp_(piece.grad, 1 - keep)
        update = piece.grad.lerp(mean, keep) if self._config.nesterov else mean
        return update.to(self._dtype(piece))

    def _apply(self, piece: TrainedPiece, update: torch.Tensor) -> None:
        rows, columns = piece.shard.shape[-2:]
        scale = math.sqrt(max(1.0, rows / columns))
        if self._config.adjust_lr == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        lr = piece.group["lr"]
        piece.weight.mul_(1 - lr * piece.group["weight_decay"])
        piece.weight.add_(update, alpha=-lr * scale)
        piece.parameter.grad = None

    def _exchange(self, pieces: list[TrainedPiece]) -> Exchange:
        """Made when matrices are first updated, on all of their ranks."""
        key = (pieces[0].shard.groups, tuple(id(piece.parameter) for piece in pieces))
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(
                [piece.shard for piece in pieces], device=pieces[0].parameter.device, dtype=self._dtype(pieces[0])
            )
        return self._exchanges[key]

    def _dtype(self, piece: TrainedPiece) -> torch.dtype:
        if self._config.ns_dtype is not None:
            dtype: torch.dtype = getattr(torch, self._config.ns_dtype)
            return dtype
        on_host = profile_of(piece.parameter.device).host
        return torch.promote_types(piece.parameter.dtype, torch.float32) if on_host else torch.bfloat16


def orthogonal(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the matrices [..., rows, columns] with their singular values brought near 1 (0.5 to 1.5), by Newton-Schulz
    steps."""
    a, b, c = _QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    found = matrices.mT if tall else matrices
    found = found.reshape(-1, *found.shape[-2:])
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return (found.mT if tall else found).reshape(matrices.shape)
