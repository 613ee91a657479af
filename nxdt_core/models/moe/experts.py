"""Experts: one feed-forward block each, their matrices stacked on a leading dimension and multiplied together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.distributed.devices import groups_on_device
from nxdt_core.distributed.torch_versions import grouped_mm
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.host_values import host_values
from nxdt_core.models.mlp import GatedSiLU
from nxdt_core.models.random.dropout import Dropout
from nxdt_core.models.updates import unchanged

_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRACED_GROUPED_DTYPES = (torch.bfloat16,)
"""Dtypes for which ``torch.compile`` can trace ``F.grouped_mm``; the loop in its place breaks the graph."""
_GROUPED_ALIGNMENT_BYTES = 16
"""Alignment of rows, of which ``F.grouped_mm`` refuses any other, as it does float64 (torch 2.13)."""


class RowGroups:
    """Rows in consecutive groups, some of which may be empty. All products of a layer share one."""

    def __init__(self, counts: torch.Tensor, sizes: list[int] | None = None) -> None:
        """``counts``: int [groups], rows of each; ``sizes``: the same on the host, where it knows them."""
        self.counts = counts
        self._offsets: torch.Tensor | None = None
        self._sizes = sizes
        self._members: torch.Tensor | None = None

    @property
    def offsets(self) -> torch.Tensor:
        """Return the end of each group, int32 [groups]."""
        if self._offsets is None:
            self._offsets = self.counts.cumsum(0).to(torch.int32)
        return self._offsets

    @property
    def sizes(self) -> list[int]:
        """Return the number of rows of each group. The host waits for the device, the first time."""
        if self._sizes is None:
            self._sizes = host_values(self.counts)
        return self._sizes

    def members(self, rows: torch.Tensor) -> torch.Tensor:
        """Return 1 where a row of ``rows`` [rows, …] is in a group, else 0: [rows, groups], in their dtype."""
        if self._members is None or self._members.dtype != rows.dtype:
            number, ends = torch.arange(len(rows), device=rows.device).unsqueeze(1), self.offsets
            self._members = ((number >= ends - self.counts) & (number < ends)).to(rows.dtype)
        return self._members


class SwiGLUExperts(nn.Module):
    """``down(silu(gate(x)) * up(x))`` for each expert, as :class:`nxdt_core.models.mlp.SwiGLU`, of matrices
    [experts, out, in].

    Column- and row-parallel like that block: with rows of gate and up and columns of down left out, the outputs are
    parts of a sum.
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, experts: int, *, dropout: float = 0.0, bias: bool = False
    ) -> None:
        """``dropout``: probability with which the activations between the matrices are zeroed while training (expert
        dropout, Fedus et al. 2021, arXiv:2101.03961, section 2.4). ``bias``: whether each matrix has one, such as
        ``gate_proj_bias`` [experts, out]."""
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, ffn_hidden_size, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(experts, ffn_hidden_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, ffn_hidden_size))
        if bias:
            for name, matrix in list(self.named_parameters()):
                self.register_parameter(f"{name}_bias", nn.Parameter(matrix.new_empty(matrix.shape[:2])))
        self.activation: nn.Module = GatedSiLU()
        self.dropout = Dropout(dropout, dispatched=True)
        self.updates = nn.ModuleDict()
        """A slot: what adapters add, an :class:`~nxdt_core.models.updates.Update` by name of the matrix."""
        self.local: Callable[[torch.Tensor], torch.Tensor] = unchanged
        """A slot: this process's part of a parameter. Engines that shard the parameters put its counterpart here."""
        self.shares = 1
        """A slot: processes that have parts of each expert's columns, and add up their outputs."""

    def forward(self, rows: torch.Tensor, groups: RowGroups | None = None) -> torch.Tensor:
        """Return each expert over its rows.

        Args:
            rows: [rows, hidden], those of expert 0 first; or [experts, rows per expert, hidden].
            groups: of the rows, one for each expert; None for the second form.

        Returns:
            The shape of ``rows``.
        """
        gate, up = self._product("gate_proj", rows, groups), self._product("up_proj", rows, groups)
        return self._product("down_proj", self.dropout(self.activation(gate, up)), groups)

    def _product(self, name: str, rows: torch.Tensor, groups: RowGroups | None) -> torch.Tensor:
        matrix = self.local(getattr(self, name))
        product = grouped_linear(rows, matrix, groups)
        if name in self.updates:
            product = self.updates[name](rows, product, matrix, groups)
        bias = getattr(self, f"{name}_bias", None)
        if bias is None:
            return product
        bias = self.local(bias).to(product.dtype)
        if name == "down_proj" and self.shares > 1:
            bias = bias / self.shares
        # A product, since backward of a lookup adds up the rows of a group in an order that varies on accelerators.
        return product + (bias.unsqueeze(1) if groups is None else groups.members(product) @ bias)

    def extra_repr(self) -> str:
        """Return the number and widths, for ``print(model)``."""
        experts, ffn_hidden_size, hidden_size = self.gate_proj.shape
        return f"{experts} experts, {hidden_size} -> {ffn_hidden_size} -> {hidden_size}"


def grouped_linear(rows: torch.Tensor, weights: torch.Tensor, groups: RowGroups | None) -> torch.Tensor:
    """Return each row multiplied by the transposed matrix of its group.

    Args:
        rows: [rows, in], group after group; or [groups, rows per group, in].
        weights: [groups, out, in].
        groups: of the rows, some of which may be empty; None for the second form.

    Returns:
        [rows, out] or [groups, rows per group, out]. Its gradient may not be an expanded scalar, such as that of a
        plain ``sum()``: the kernel rejects those.
    """
    if groups is None and rows.is_meta:
        return torch.bmm(rows, weights.transpose(1, 2))
    if rows.is_meta:  # the groups of the rows are unknown; sizes, kept tensors and arithmetic equal those of any matrix
        return functional.linear(rows, weights.to(compute_dtype(rows))[0])
    dtype = compute_dtype(rows)  # autocast does not know grouped_mm
    rows, weights = rows.to(dtype), weights.to(dtype)
    if groups is None:
        return _BatchedLinear.apply(rows, weights)  # type: ignore[no-untyped-call, no-any-return]
    dtypes = _TRACED_GROUPED_DTYPES if torch.compiler.is_compiling() else _GROUPED_DTYPES
    aligned = not any(side * weights.element_size() % _GROUPED_ALIGNMENT_BYTES for side in weights.shape[1:])
    if grouped_mm is not None and dtype in dtypes and aligned and _on_device(weights.device, dtype):
        product: torch.Tensor = grouped_mm(rows, weights.transpose(1, 2), offs=groups.offsets)
        return product
    parts = zip(torch.split(rows, groups.sizes), weights.unbind(0), strict=True)
    return torch.cat([functional.linear(part, weight) for part, weight in parts])


class _BatchedLinear(torch.autograd.Function):
    """``bmm(rows, weights.transpose(1, 2))`` with a contiguous gradient of the weights.

    Autograd computes that gradient transposed, and copies it into the parameter's layout by an uncoalesced kernel: 10
    of 90 ms of a step of Mixtral on an H200.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        return torch.bmm(rows, weights.transpose(1, 2))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rows, weights = ctx.saved_tensors
        of_rows, of_weights = ctx.needs_input_grad
        return (
            torch.bmm(grad, weights) if of_rows else None,
            torch.bmm(grad.transpose(1, 2), rows) if of_weights else None,
        )


def _on_device(device: torch.device, dtype: torch.dtype) -> bool:
    return groups_on_device(device, dtype)


# What torch.compiler.assume_constant_result does; that imports all of torch's compiler.
_on_device._dynamo_marked_constant = True  # type: ignore[attr-defined]
