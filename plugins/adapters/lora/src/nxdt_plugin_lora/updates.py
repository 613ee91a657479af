"""The modules that train: low-rank updates of linear layers, embeddings and experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.models.moe.experts import RowGroups, grouped_linear
from nxdt_core.models.random.dropout import Dropout
from nxdt_core.models.updates import Update

__all__ = ["DoraEmbeddingUpdate", "DoraUpdate", "EmbeddingUpdate", "ExpertsUpdate", "LowRankUpdate"]


class LowRankUpdate(Update):
    """Of a linear layer: ``product + scaling * (dropout(x) Aᵀ) Bᵀ`` (Hu et al. 2021, arXiv:2106.09685)."""

    follows: Mapping[str, int] = {"lora_A": 1, "lora_B": 0}
    reads_weight = False
    grows = "lora_B"
    """What starts at zero."""

    def __init__(self, inputs: int, outputs: int, *, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, inputs))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank))
        self.scaling = scaling
        self.dropout = Dropout(dropout)

    def forward(self, hidden: torch.Tensor, product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``hidden`` [..., in] and ``product`` [..., out] to the latter's shape."""
        narrow = functional.linear(self.dropout(hidden), self.local(self.lora_A))  # [..., rank]
        return _plus_scaled(product, narrow, self.local(self.lora_B), self.scaling)


class DoraUpdate(LowRankUpdate):
    """As its base, with the rows of W + s B A brought to trained norms (Liu et al. 2024, arXiv:2402.09353).

    As there (section 4.3), no gradient passes through the rows' own norms. The norms are those of
    ``|w|² + 2 s w·(Aᵀ b) + s² bᵀ (A Aᵀ) b``: no matrix of the weight's size is made.
    """

    follows: Mapping[str, int] = {**LowRankUpdate.follows, "lora_magnitude": 0}
    reads_weight = True

    def __init__(self, inputs: int, outputs: int, *, rank: int, scaling: float, dropout: float) -> None:
        super().__init__(inputs, outputs, rank=rank, scaling=scaling, dropout=dropout)
        self.lora_magnitude = nn.Parameter(torch.empty(outputs))

    def forward(self, hidden: torch.Tensor, product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the base's product with the update. Under dropout the frozen product keeps its inputs whole, and what
        is trained of it does not, as in peft."""
        down, up = self.local(self.lora_A), self.local(self.lora_B)
        factor = self.local(self.lora_magnitude) / self._norms(weight, down, up)
        dropped = self.dropout(hidden)
        narrow = functional.linear(dropped, down)
        if dropped is hidden:
            return factor * _plus_scaled(product, narrow, up, self.scaling)
        turned = (factor - 1) * functional.linear(dropped, weight)
        return product + turned + factor * self.scaling * functional.linear(narrow, up)

    @torch.no_grad()
    def _norms(self, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """2-norms of the rows of the updated weight, [out]; never zero."""
        wide = _wide(weight)
        own = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
        scaled = self.scaling * up.to(wide)
        crossed = 2 * (scaled * functional.linear(weight, down.to(weight.dtype))).sum(1)
        added = (scaled @ (down.to(wide) @ down.to(wide).t()) * scaled).sum(1)
        return _root(self.over_inputs(own + crossed + added)).to(up.dtype)


class EmbeddingUpdate(Update):
    """Of an embedding: rows of ``A`` [rows, rank], which starts at zero, times ``B`` [rank, width]."""

    follows: Mapping[str, int] = {"lora_A": 0, "lora_B": 1}
    grows = "lora_A"
    """What starts at zero."""
    inputs = 0

    def __init__(self, rows: int, width: int, *, rank: int, scaling: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rows, rank))
        self.lora_B = nn.Parameter(torch.empty(rank, width))
        self.scaling = scaling

    def forward(self, ids: torch.Tensor, product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``ids`` int64 [...] and ``product`` [..., width] to the latter's shape."""
        narrow = functional.embedding(ids, self.local(self.lora_A))
        return _plus_scaled(product, narrow, self.local(self.lora_B).t(), self.scaling)


class DoraEmbeddingUpdate(EmbeddingUpdate):
    """As its base, with the columns of W + s A B brought to trained norms, as in peft; see :class:`DoraUpdate`."""

    follows: Mapping[str, int] = {**EmbeddingUpdate.follows, "lora_magnitude": 1}

    def __init__(self, rows: int, width: int, *, rank: int, scaling: float) -> None:
        super().__init__(rows, width, rank=rank, scaling=scaling)
        self.lora_magnitude = nn.Parameter(torch.empty(width))

    def forward(self, ids: torch.Tensor, product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the base's embedding with the update, scaled by the magnitudes."""
        norms = self._norms(weight, self.local(self.lora_A), self.local(self.lora_B))
        return self.local(self.lora_magnitude) / norms * super().forward(ids, product, weight)

    @torch.no_grad()
    def _norms(self, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """2-norms of the columns of the updated table, [width]; never zero."""
        wide = _wide(weight)
        own = torch.linalg.vector_norm(weight, dim=0, dtype=wide).square()
        scaled = self.scaling * up.to(wide)
        crossed = 2 * (scaled * (down.to(weight.dtype).t() @ weight)).sum(0)
        added = (scaled * (down.to(wide).t() @ down.to(wide) @ scaled)).sum(0)
        return _root(self.over_inputs(own + crossed + added)).to(up.dtype)


class ExpertsUpdate(Update):
    """Of one matrix of experts [experts, out, in]: an update for each expert, from its own rows."""

    follows: Mapping[str, int] = {"lora_A": 2, "lora_B": 1}
    grows = "lora_B"
    """What starts at zero."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(experts, rank, inputs))
        self.lora_B = nn.Parameter(torch.empty(experts, outputs, rank))
        self.scaling = scaling
        self.dropout = Dropout(dropout, dispatched=True)

    def forward(
        self, rows: torch.Tensor, product: torch.Tensor, weight: torch.Tensor, groups: RowGroups | None
    ) -> torch.Tensor:
        """``rows``, ``groups`` and the result as of :func:`nxdt_core.models.moe.experts.grouped_linear`."""
        narrow = grouped_linear(self.dropout(rows), self.local(self.lora_A), groups)
        return product + self.scaling * grouped_linear(narrow, self.local(self.lora_B), groups)


def _wide(weight: torch.Tensor) -> torch.dtype:
    """What sums of squares of ``weight`` are computed in."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _root(squares: torch.Tensor) -> torch.Tensor:
    return squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()


def _plus_scaled(product: torch.Tensor, narrow: torch.Tensor, up: torch.Tensor, scaling: float) -> torch.Tensor:
    """``product + scaling * narrow @ upᵀ`` in one kernel, which makes no second tensor of that size."""
    flat = product.reshape(-1, product.shape[-1])
    return torch.addmm(flat, narrow.reshape(-1, narrow.shape[-1]), up.t(), alpha=scaling).view(product.shape)
