"""Top-k routing of tokens to experts, with capacity and the losses that keep it balanced.

Auxiliary losses are sums over the tokens that this process has (:mod:`nxdt_core.models.moe.layer`): the step divides
them by the number of tokens of the global batch. What a coefficient multiplies is therefore the mean of ``L_m`` over
the tokens, with or without a label:

    (sum over the micro-batches m of the global batch of  tokens_m · L_m)  /  (sum of tokens_m)

with ``L_m`` the published, dimensionless loss of one layer over one micro-batch. Layers add up. A micro-batch has its
statistics to itself, whichever data parallel rank computes it, so the same micro-batches give the same losses in every
layout; context parallel ranks hold parts of one micro-batch and share them.

Padding (:attr:`~nxdt_core.protocols.step_context.StepContext.padding`) takes no place of an expert, and no loss and no
statistic counts it. Shapes do not depend on data, so without a capacity experts compute its rows, too: they are spread
evenly and have the weight 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.models.autocast import without_autocast
from nxdt_core.models.step_boundary import step_of
from nxdt_core.protocols.step_context import ALL_LAYERS, StepContext

RouterOrder = Literal["softmax_topk", "topk_softmax"]
"""Order of the steps: the top k of the probabilities over all experts, or a softmax over the top k logits."""


class TokenShards(Protocol):
    """The part of the micro-batch that this process has.

    Capacity and load are defined over the whole micro-batch, independent of the ranks that hold its tokens; this is
    what turns counts of one process's tokens into those.
    """

    @property
    def shards(self) -> int:
        """Processes over which the sequences are divided, in equal parts."""
        ...

    @property
    def segments(self) -> int:
        """Runs of neighbouring tokens, of equal length, that this process holds of each sequence."""
        ...

    @property
    def copies(self) -> int:
        """Processes that compute the router on these very tokens and whose gradients are summed."""
        ...

    def count(self, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the counts of this process's segments into their places in the micro-batch. Collective.

        Args:
            counts: int64 [batch, segments, experts].

        Returns:
            ``(before, total)``: what all earlier segments of the micro-batch hold, those of earlier rows included,
            [batch, segments, experts]; and what the whole micro-batch holds, [experts].
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeMicroBatch:
    """Counts tokens where every rank has the whole micro-batch."""

    copies: int = 1
    """Processes that compute the router on the same tokens and whose gradients are summed."""
    shards: int = 1
    segments: int = 1

    def count(self, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the counts of :meth:`TokenShards.count`, without communication."""
        return exclusive_cumsum(counts), counts.sum((0, 1))


def exclusive_cumsum(counts: torch.Tensor) -> torch.Tensor:
    """Return the ``counts`` [batch, segments, experts] of what comes before each segment, rows first."""
    flat = counts.flatten(0, 1)
    return (flat.cumsum(0) - flat).view_as(counts)


def expert_capacity(factor: float, *, tokens: int, top_k: int, experts: int) -> int:
    """Return how many assignments of a micro-batch an expert takes: ``factor`` times its equal share, rounded up."""
    share = factor * tokens * top_k / experts
    return math.ceil(share - 1e-9 * share)  # 1.1 · 10 is 11.000000000000002


def slots_within(capacity: int, segments: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Number the assignments to each expert, and refuse those over capacity.

    Refused assignments come last in the micro-batch. This process therefore keeps the first of its assignments to an
    expert, and their numbers have no gaps.

    Args:
        capacity: assignments of the micro-batch that each expert takes.
        segments: int64 [batch, segments, tokens, experts], 1 where a token chose the expert.
        before: int64 [batch, segments, experts], assignments in earlier segments of the whole micro-batch.

    Returns:
        int64 [batch, segments, tokens, experts]: the number, from 0, among this process's assignments to the expert;
        −1 where it is refused, or the token did not choose the expert.
    """
    in_segment = segments.cumsum(2) - 1
    here = in_segment + exclusive_cumsum(segments.sum(2)).unsqueeze(2)
    return torch.where((segments > 0) & (in_segment + before.unsqueeze(2) < capacity), here, -1)


def balance_loss_sum(probabilities: torch.Tensor, assigned: torch.Tensor) -> torch.Tensor:
    """Return ``tokens · L``, as far as the tokens of this process contribute to it. ``L = experts · Σ_e f_e P_e``
    (Fedus et al. 2021, arXiv:2101.03961, equation 4; GShard, arXiv:2006.16668).

    ``f_e`` is the share of the micro-batch's assignments that chose expert e, before any are dropped (the shares add
    up to 1 for any ``top_k``; Hugging Face's add up to ``top_k``); ``P_e`` is the mean probability. Perfect balance is
    ``L = 1``. ``f`` is a count without a gradient, so ``L`` is linear in the tokens' probabilities: the parts of all
    processes add up to the whole, and so do their gradients.

    Args:
        probabilities: [..., experts] of this process's tokens, over all experts; 0 where there is padding.
        assigned: int [experts], assignments of the whole micro-batch.
    """
    experts = probabilities.shape[-1]
    return experts * (probabilities.flatten(0, -2).sum(0) * _shares(assigned, probabilities.dtype)).sum()


def _shares(assigned: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return assigned.to(dtype) / assigned.sum().clamp(min=1)  # a micro-batch may be all padding


class _PooledBalance(torch.autograd.Function):
    """``Σ_e F_e · sums_e``, with ``F`` the mean of all layers' shares: known in backward, when all have run forward."""

    @staticmethod
    def forward(
        ctx: Any, sums: torch.Tensor, of_layer: torch.Tensor, shares: dict[int, torch.Tensor], layers: int
    ) -> torch.Tensor:
        ctx.shares, ctx.layers = shares, layers
        return (sums * of_layer).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        total = ctx.shares.get(ALL_LAYERS)
        total = torch.stack([*ctx.shares.values()]).sum(0) if total is None else total
        return grad * total / ctx.layers, None, None, None


def _without(padding: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` [batch, seq] or [batch, seq, experts], 0 at padding."""
    if padding is None:
        return values
    return values.masked_fill(padding if values.ndim == padding.ndim else padding.unsqueeze(-1), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatistics:
    """A router's statistics over this process's tokens of one micro-batch; on the device, detached.

    Sums, so that they add up over micro-batches and over data and context parallel ranks (tensor parallel ranks have
    copies).
    """

    assigned: torch.Tensor
    """Assignments, dropped ones included, int64 [experts]."""
    dropped: torch.Tensor
    """Assignments over capacity, int64 scalar."""
    entropy: torch.Tensor
    """Scalar, nats: the entropies of the tokens' distributions over all experts, summed."""
    tokens: torch.Tensor
    """Number of tokens, int64 scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Assignments of a micro-batch's tokens to experts; [tokens] is [batch, seq] flattened."""

    experts: torch.Tensor
    """Experts of each token, int64 [tokens, top_k]."""
    weights: torch.Tensor
    """Factors of the experts' outputs, [tokens, top_k], float32 at the least."""
    counts: torch.Tensor
    """Assignments of this process, dropped ones and those of padding included, int64 [experts]."""
    slots: torch.Tensor | None = None
    """Number among this process's assignments to the same expert, int64 [tokens, top_k], with capacity only; −1 where
    the assignment is dropped or of padding."""
    capacity: int | None = None
    """Most assignments of this process that an expert can get, with capacity only; a function of shapes."""
    aux_loss: torch.Tensor | None = None
    """Scalar for :func:`nxdt_core.models.moe.layer.add_aux_loss`, or None where there is none."""


class TopKRouter(nn.Module):
    """Sends each token to its ``top_k`` best experts (Shazeer et al. 2017, arXiv:1701.06538).

    Computed in float32 at the least, also under autocast: with bfloat16 logits, experts that are close swap places
    (Fedus et al. 2021, section 2.4). The scores are linear in the token; there is no noise.
    """

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        *,
        top_k: int,
        order: RouterOrder = "softmax_topk",
        normalize: bool = False,
        capacity_factor: float | None = None,
        balance_coefficient: float = 0.0,
        z_coefficient: float = 0.0,
        pooled: tuple[int, int] | None = None,
    ) -> None:
        """Create the router's weight [experts, hidden].

        Args:
            hidden_size: width of the tokens.
            experts: number of experts.
            top_k: experts per token.
            order: see :data:`RouterOrder`.
            normalize: let each token's weights add up to 1 (they do anyway with ``topk_softmax``).
            capacity_factor: an expert takes ``ceil(capacity_factor · tokens · top_k / experts)`` assignments of each
                micro-batch, those of the earliest positions (row after row); the others are dropped, and the weights
                of a token's other experts stay what they are. ``tokens`` are positions, padding included. None drops
                nothing; nor does a pass in evaluation mode that has no labels: a text's logits do not depend on the
                others of a batch, and a cache of keys gives the logits of the whole text.
            balance_coefficient: of :func:`~nxdt_core.models.moe.router.balance_loss_sum`.
            z_coefficient: of ``Σ_tokens logsumexp(logits)²`` (Zoph et al. 2022, arXiv:2202.08906, equation 5).
            pooled: (n, layers): of the router with number n of so many, the balance loss multiplies mean probabilities
                with the shares of the assignments in the mean over all of them; None: with its own shares. Summed over
                the layers, that is the loss of all their tokens as if they were of one layer
                (``load_balancing_loss_func`` of transformers).

        Raises:
            ValueError: ``top_k`` is not among 1 … ``experts``, or the capacity factor is not above 0.
        """
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k is {top_k} of {experts} experts")
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(f"capacity_factor is {capacity_factor}, not above 0")
        self.experts, self.top_k, self.order, self.normalize = experts, top_k, order, normalize
        self.capacity_factor = capacity_factor
        self.balance_coefficient, self.z_coefficient = balance_coefficient, z_coefficient
        self.pooled = pooled
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))
        self._counts: torch.Tensor
        self._entropy: torch.Tensor
        self.shards: TokenShards = WholeMicroBatch()
        self.register_buffer("_counts", None, persistent=False)
        self.register_buffer("_entropy", None, persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Make room for the statistics, on the device of the weight."""
        device, dtype = self.weight.device, torch.promote_types(self.weight.dtype, torch.float32)
        self._counts = torch.zeros(self.experts + 2, dtype=torch.int64, device=device)
        self._entropy = torch.zeros((), dtype=dtype, device=device)

    @property
    def statistics(self) -> RouterStatistics:
        """Return the statistics of the last forward pass, which the next one overwrites; recomputation gives the same.

        Buffers, since a compiled graph that is recomputed can leave nothing else behind.
        """
        assigned, (dropped, tokens) = self._counts[: self.experts], self._counts[self.experts :].unbind()
        return RouterStatistics(assigned=assigned, dropped=dropped, entropy=self._entropy, tokens=tokens)

    def forward(self, hidden: torch.Tensor, step: StepContext | None = None) -> Routing:
        """Route ``hidden`` [batch, seq, hidden], this process's part of the micro-batch of ``step``."""
        context = step_of(step)
        padding, dtype = context.padding, torch.promote_types(hidden.dtype, torch.float32)  # [batch, seq]
        with without_autocast(hidden):
            logits = functional.linear(hidden.to(dtype), self.weight.to(dtype))  # [batch, seq, experts]
        probabilities = logits.softmax(-1)
        experts, weights = self._choose(logits, probabilities, padding)  # [batch, seq, top_k]
        probabilities = _without(padding, probabilities)
        if padding is not None:
            spread = torch.arange(experts.numel(), device=experts.device).view_as(experts) % self.experts
            experts = torch.where(padding.unsqueeze(-1), spread, experts)
        chosen = torch.zeros_like(logits, dtype=torch.int64).scatter_(-1, experts, 1)
        # [batch, segments, tokens, experts]
        segments = _without(padding, chosen).view(len(hidden), self.shards.segments, -1, self.experts)
        counts = segments.sum(2)
        # Where nothing depends on the whole micro-batch, the processes that share it need not talk.
        balanced = self.balance_coefficient > 0 and torch.is_grad_enabled()
        limited = self.capacity_factor is not None and (self.training or context.labels is not None)
        slots = capacity = total = None
        if balanced or limited:
            before, total = self.shards.count(counts)
        if limited:
            assert self.capacity_factor is not None
            local_tokens = segments[..., 0].numel()
            tokens = local_tokens * self.shards.shards
            share = expert_capacity(self.capacity_factor, tokens=tokens, top_k=self.top_k, experts=self.experts)
            by_expert = slots_within(share, segments, before).flatten(1, 2)  # [batch, seq, experts]
            slots, capacity = by_expert.gather(-1, experts).flatten(0, 1), min(local_tokens, share)
        losses = []
        if balanced:
            assert total is not None
            balance = balance_loss_sum(probabilities, total)
            if self.pooled is not None:
                shares, pool = _shares(total, probabilities.dtype), context.pooled_shares
                number, layers = self.pooled
                pool[number] = shares
                sums = probabilities.flatten(0, -2).sum(0)
                balance = _PooledBalance.apply(sums, shares, pool, layers)  # type: ignore[no-untyped-call]
                balance = self.experts * balance
            losses.append(self.balance_coefficient * balance)
        if self.z_coefficient > 0 and torch.is_grad_enabled():
            losses.append(self.z_coefficient * _without(padding, logits.logsumexp(-1).square()).sum())
        with torch.no_grad():
            entropy = logits.logsumexp(-1) - (probabilities * logits).sum(-1)  # [batch, seq]
            assigned, assignments = counts.sum((0, 1)), counts.sum()
            dropped = torch.zeros_like(assignments) if slots is None else assignments - (slots >= 0).sum()
            self._counts.copy_(torch.cat((assigned, torch.stack((dropped, assignments // self.top_k)))))
            self._entropy.copy_(_without(padding, entropy).sum())
        return Routing(
            experts=experts.flatten(0, 1),
            weights=_without(padding, weights).flatten(0, 1),
            counts=chosen.sum((0, 1)),
            slots=slots,
            capacity=capacity,
            aux_loss=torch.stack(losses).sum() / self.shards.copies if losses else None,
        )

    def _choose(
        self, logits: torch.Tensor, probabilities: torch.Tensor, padding: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = probabilities if self.order == "softmax_topk" else logits
        best, experts = scores.topk(self.top_k, dim=-1)
        if self.order == "topk_softmax":
            return experts, best.softmax(-1)
        return experts, best / best.sum(-1, keepdim=True) if self.normalize else best

    def extra_repr(self) -> str:
        """Return what is chosen from how many, for ``print(model)``."""
        return f"top {self.top_k} of {self.experts}, {self.order}, capacity_factor={self.capacity_factor}"
