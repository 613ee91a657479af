"""The way of tokens to the experts that a router chose, and back: rows in the experts' order, and weighted sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nxdt_core.models.moe.experts import RowGroups
from nxdt_core.models.moe.router import Routing
from nxdt_core.models.random.dropout import TokenNumbers, run_numbered
from nxdt_core.models.step_boundary import step_of
from nxdt_core.protocols.step_context import StepContext


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPermutation:
    """Assignment i of token i // top_k is in row ``row_of[i]``; the two vectors are each other's inverse.

    With both at hand, forward and backward only ever read by index: no sums over equal indices, which accelerators add
    up in an order that differs from run to run.
    """

    row_of: torch.Tensor
    """Row of each assignment, int64 [assignments]; −1 for dropped ones."""
    assignment_of: torch.Tensor
    """Assignment in each row, int64 [rows]; −1 for rows that stay empty."""
    top_k: int
    holes: bool
    """``assignment_of`` may have a −1."""

    @classmethod
    def ordered(cls, groups: torch.Tensor, top_k: int = 1) -> TokenPermutation:
        """Return the rows in the order of ``groups`` int64 [assignments], equal ones in their own order."""
        assignment_of = groups.argsort(stable=True)
        row_of = torch.empty_like(assignment_of)
        row_of[assignment_of] = torch.arange(len(groups), device=groups.device)
        return cls(row_of=row_of, assignment_of=assignment_of, top_k=top_k, holes=False)

    @classmethod
    def by_capacity(cls, routing: Routing) -> TokenPermutation:
        """Return a permutation with ``routing.capacity`` rows for each expert, filled from the first on."""
        assert routing.slots is not None
        assert routing.capacity is not None
        tokens, top_k = routing.experts.shape
        slots = routing.slots.flatten()
        rows = len(routing.counts) * routing.capacity
        row_of = torch.where(slots < 0, -1, routing.experts.flatten() * routing.capacity + slots)
        assignment_of = torch.full((rows + 1,), -1, dtype=torch.int64, device=slots.device)
        # Dropped ones all write to the last row, which is then cut off.
        assignment_of[row_of.where(row_of >= 0, rows)] = torch.arange(tokens * top_k, device=slots.device)
        return cls(row_of=row_of, assignment_of=assignment_of[:rows], top_k=top_k, holes=True)


def permute(tokens: torch.Tensor, permutation: TokenPermutation) -> torch.Tensor:
    """Return each token in the rows of its assignments: [tokens, hidden] to [rows, hidden]; empty rows are zero."""
    return _Permute.apply(tokens, permutation)  # type: ignore[no-untyped-call, no-any-return]


def unpermute(rows: torch.Tensor, permutation: TokenPermutation) -> torch.Tensor:
    """Return the row of each assignment: [rows, hidden] to [tokens, top_k, hidden]; zero for dropped ones."""
    tokens: torch.Tensor = _Unpermute.apply(rows, permutation)  # type: ignore[no-untyped-call]
    return tokens.view(-1, permutation.top_k, rows.shape[1])


class LocalDispatcher(nn.Module):
    """Runs experts that all live in this process.

    A slot: expert parallelism puts a module with the same call in its place, which moves the rows to the processes
    that have the experts, and tensor parallelism adds up what its ranks computed. It has no parameters.
    """

    def __init__(self, chunks: int = 1) -> None:
        """``chunks``: parts in which a module in the place of this one sends rows to other processes, so that one part
        travels while another one is computed."""
        super().__init__()
        self.chunks = chunks
        self.numbers: TokenNumbers | None = None
        """A slot: engines fill it where the experts have dropout, whose masks follow from the tokens' numbers."""

    @property
    def rank(self) -> int:
        """Return which of the equal parts of the experts this process has."""
        return 0

    def run(
        self,
        hidden: torch.Tensor,
        routing: Routing,
        experts: nn.Module,
        by: Callable[[torch.Tensor, Routing, Any], torch.Tensor] | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return what :meth:`forward` or ``by`` returns; while training, experts with dropout know each row's token."""
        by, numbers = by or self, None
        if self.numbers is not None and self.training and not hidden.is_meta:
            step = step_of(step)
            numbers = self.numbers.of(hidden.shape[:-1].numel(), hidden.device, step)
        if step is None or numbers is None:
            return by(hidden, routing, experts)
        return run_numbered(
            lambda tokens, called: by(tokens, routing, called),
            hidden,
            experts,
            step=step,
            numbers=numbers,
            count=len(routing.counts),
            rank=self.rank,
        )

    def forward(self, hidden: torch.Tensor, routing: Routing, experts: nn.Module) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token.

        Args:
            hidden: [batch, seq, hidden].
            routing: the experts, weights and slots of these tokens.
            experts: called with rows as :class:`nxdt_core.models.moe.experts.SwiGLUExperts` is.

        Returns:
            [batch, seq, hidden]; zero for a token whose assignments are all dropped.
        """
        return self.finish(self.mixed(hidden.flatten(0, 1), routing, experts).view_as(hidden))

    def mixed(self, tokens: torch.Tensor, routing: Routing, experts: nn.Module) -> torch.Tensor:
        """Compute forward for ``tokens`` [tokens, hidden], without :meth:`finish`."""
        if routing.capacity is None:
            permutation, counts = self.ordered(routing)
            outputs = self.run_ordered(permute(tokens, permutation), counts, experts)
        else:
            permutation = TokenPermutation.by_capacity(routing)
            padded = permute(tokens, permutation).view(-1, routing.capacity, tokens.shape[1])
            outputs = self.run_padded(padded, experts).flatten(0, 1)
        by_token = unpermute(outputs, permutation)  # [tokens, top_k, hidden]
        return (by_token * routing.weights.unsqueeze(-1)).sum(1).to(tokens.dtype)

    def ordered(self, routing: Routing) -> tuple[TokenPermutation, torch.Tensor]:
        """Return the rows in the order in which :meth:`run_ordered` expects them, and how many each expert has."""
        return TokenPermutation.ordered(routing.experts.flatten(), routing.experts.shape[1]), routing.counts

    def run_ordered(self, rows: torch.Tensor, counts: torch.Tensor, experts: nn.Module) -> torch.Tensor:
        """Return the outputs of ``rows`` [rows, hidden], ``counts`` [experts] of them for each expert."""
        outputs: torch.Tensor = experts(rows, RowGroups(counts))
        return outputs

    def run_padded(self, rows: torch.Tensor, experts: nn.Module) -> torch.Tensor:
        """Return the outputs of ``rows`` [experts, capacity, hidden]; shapes do not depend on the routing."""
        outputs: torch.Tensor = experts(rows)
        return outputs

    def finish(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return the whole sum of which ``mixed`` [batch, seq, hidden] is this process's part."""
        return mixed


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, permutation: TokenPermutation) -> torch.Tensor:
        ctx.save_for_backward(permutation.row_of)
        ctx.top_k, ctx.holes = permutation.top_k, permutation.holes
        # Floor division keeps the −1 of empty rows.
        tokens_of = permutation.assignment_of.div(permutation.top_k, rounding_mode="floor")
        return _read(tokens, tokens_of, permutation.holes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (row_of,) = ctx.saved_tensors
        return _read(grad, row_of, ctx.holes).view(-1, ctx.top_k, grad.shape[1]).sum(1), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, permutation: TokenPermutation) -> torch.Tensor:
        ctx.save_for_backward(permutation.assignment_of)
        ctx.holes = permutation.holes
        return _read(rows, permutation.row_of, permutation.holes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (assignment_of,) = ctx.saved_tensors
        return _read(grad, assignment_of, ctx.holes), None


def _read(source: torch.Tensor, indices: torch.Tensor, holes: bool) -> torch.Tensor:
    """Return ``source[indices]``, zero where an index is −1."""
    if not holes:
        return source.index_select(0, indices)
    # Not in place: in a graph of torch 2.11 the gradient of what an autograd function returns would be lost.
    return source.index_select(0, indices.clamp(min=0)).masked_fill((indices < 0).unsqueeze(1), 0)
