"""Top-k routing of tokens to experts, with capacity and the losses that keep it balanced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.models.autocast import without_autocast
from nxdt_core.models.moe.capacity import expert_capacity, slots_within
from nxdt_core.models.moe.router_losses import balance_loss_sum, z_loss_sum
from nxdt_core.models.moe.token_shards import TokenShards, WholeMicroBatch

__all__ = ["RouterOrder", "RouterStatistics", "Routing", "TopKRouter"]

RouterOrder = Literal["softmax_topk", "topk_softmax"]
"""Whether weights are the chosen ones of the probabilities over all experts, or a softmax over the chosen logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatistics:
    """What a router did with this process's tokens of one micro-batch; on the device, detached.

    Sums, so that they add up over micro-batches and over data and context parallel ranks (tensor parallel ranks have
    copies).
    """

    assigned: torch.Tensor
    """int64 [experts]: assignments, dropped ones included."""
    dropped: torch.Tensor
    """int64 scalar: assignments over capacity."""
    entropy: torch.Tensor
    """Scalar, nats: the entropies of the tokens' distributions over all experts, summed."""
    tokens: torch.Tensor
    """int64 scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where the tokens of a micro-batch go; [tokens] is [batch, seq] flattened."""

    experts: torch.Tensor
    """int64 [tokens, top_k]"""
    weights: torch.Tensor
    """[tokens, top_k], float32 at the least: factors of the experts' outputs."""
    counts: torch.Tensor
    """int64 [experts]: this process's assignments, dropped ones included."""
    slots: torch.Tensor | None = None
    """int64 [tokens, top_k], with capacity only: the number among this process's assignments to the same expert, −1
    where the assignment is dropped."""
    capacity: int | None = None
    """With capacity: how many assignments of this process an expert can get at the most; a function of shapes."""
    aux_loss: torch.Tensor | None = None
    """Scalar for :func:`nxdt_core.models.moe.aux_loss.add_aux_loss`, or None where there is none."""


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
    ) -> None:
        """Create the router's weight [experts, hidden].

        Args:
            hidden_size: of the tokens.
            experts: to choose from.
            top_k: experts per token.
            order: see :data:`RouterOrder`.
            normalize: let each token's weights add up to 1 (they do anyway with ``topk_softmax``).
            capacity_factor: an expert takes ``ceil(capacity_factor · tokens · top_k / experts)`` assignments of each
                micro-batch, those of the earliest positions (row after row); the others are dropped, and the weights
                of a token's other experts stay what they are. None drops nothing.
            balance_coefficient: of :func:`~nxdt_core.models.moe.router_losses.balance_loss_sum`.
            z_coefficient: of :func:`~nxdt_core.models.moe.router_losses.z_loss_sum`.

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

    def forward(self, hidden: torch.Tensor) -> Routing:
        """Route ``hidden`` [batch, seq, hidden], this process's part of a micro-batch."""
        logits = self._logits(hidden)  # [batch, seq, experts]
        probabilities = logits.softmax(-1)
        experts, weights = self._choose(logits, probabilities)  # [batch, seq, top_k]
        chosen = torch.zeros_like(logits, dtype=torch.int64).scatter_(-1, experts, 1)
        # [batch, segments, tokens, experts]
        segments = chosen.view(len(hidden), self.shards.segments, -1, self.experts)
        counts = segments.sum(2)
        before, total = self._counted(counts)
        slots = None if before is None else self._slots(segments, before, experts)
        self._record(logits, probabilities, counts, slots)
        return Routing(
            experts=experts.flatten(0, 1),
            weights=weights.flatten(0, 1),
            counts=counts.sum((0, 1)),
            slots=slots,
            capacity=None if slots is None else min(len(slots), self._capacity(len(slots))),
            aux_loss=self._aux_loss(logits, probabilities, total),
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        with without_autocast(hidden):
            return functional.linear(hidden.to(dtype), self.weight.to(dtype))

    def _choose(self, logits: torch.Tensor, probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = probabilities if self.order == "softmax_topk" else logits
        best, experts = scores.topk(self.top_k, dim=-1)
        if self.order == "topk_softmax":
            return experts, best.softmax(-1)
        return experts, best / best.sum(-1, keepdim=True) if self.normalize else best

    def _counted(self, counts: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(assignments before each segment, in the whole micro-batch), each None where nothing depends on it: the
        processes that share the micro-batch then need not talk."""
        balanced = self.balance_coefficient > 0 and torch.is_grad_enabled()
        limited = self.capacity_factor is not None
        if not (balanced or limited):
            return None, None
        before, total = self.shards.count(counts)
        return before if limited else None, total if balanced else None

    def _capacity(self, local_tokens: int) -> int:
        assert self.capacity_factor is not None
        tokens = local_tokens * self.shards.shards
        return expert_capacity(self.capacity_factor, tokens=tokens, top_k=self.top_k, experts=self.experts)

    def _slots(self, segments: torch.Tensor, before: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        capacity = self._capacity(segments[..., 0].numel())
        slots = slots_within(capacity, segments, before).flatten(1, 2)  # [batch, seq, experts]
        return slots.gather(-1, experts).flatten(0, 1)

    def _aux_loss(
        self, logits: torch.Tensor, probabilities: torch.Tensor, total: torch.Tensor | None
    ) -> torch.Tensor | None:
        losses = []
        if total is not None:
            tokens = probabilities[..., 0].numel() * self.shards.shards
            balance = balance_loss_sum(probabilities, total, top_k=self.top_k, micro_batch_tokens=tokens)
            losses.append(self.balance_coefficient * balance)
        if self.z_coefficient > 0 and torch.is_grad_enabled():
            losses.append(self.z_coefficient * z_loss_sum(logits))
        return torch.stack(losses).sum() / self.shards.copies if losses else None

    @torch.no_grad()
    def _record(
        self, logits: torch.Tensor, probabilities: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor | None
    ) -> None:
        entropy = logits.logsumexp(-1) - (probabilities * logits).sum(-1)  # [batch, seq]
        dropped = counts.new_zeros(1) if slots is None else (slots < 0).sum().view(1)
        self._counts.copy_(torch.cat((counts.sum((0, 1)), dropped, counts.new_full((1,), entropy.numel()))))
        self._entropy.copy_(entropy.sum())

    def extra_repr(self) -> str:
        """Return what is chosen from how many, for ``print(model)``."""
        return f"top {self.top_k} of {self.experts}, {self.order}, capacity_factor={self.capacity_factor}"
