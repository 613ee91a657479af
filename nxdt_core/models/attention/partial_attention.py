"""Blocks of an attention matrix: computed one after the other in bounded memory, merged by log-sum-exp.

Attention over parts is exact once the parts are merged by the log-sum-exp of their scores, and backward over a part is
exact when it is given the output and the log-sum-exp over all keys (Dao et al. 2022, arXiv:2205.14135).
``F.scaled_dot_product_attention`` hides both, so this file calls torch's kernels below it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch.nn import functional

from nxdt_core.distributed.devices import profile_of
from nxdt_core.models.attention.grouped_query import block_rows
from nxdt_core.models.autocast import without_autocast

_HALF_TYPES = (torch.bfloat16, torch.float16)
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Gradients of query, key and value."""

_ELEMENTS_AT_A_TIME = 1 << 22
"""Scores, or elements of a mask, that are held at once: 16 MiB of float32 …"""
_ROWS_AT_A_TIME = 128
"""… or those of this many rows, below which matrix products do not pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Scores of a block: ``scale`` x query · key, and −∞ where a row does not see a key."""

    scale: float
    softcap: float | None = None
    """Scores are ``softcap · tanh(score / softcap)``, which the composed kernel alone computes; None: as they are."""
    causal: bool = False
    """Row ``i`` sees keys 0 … ``i``; not together with ``visible``."""
    visible: torch.Tensor | None = None
    """Keys that each row sees, bool [batch or 1, 1, rows, keys]; None where all are seen."""

    def additive_mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return ``visible`` as 0 and −∞ to be added to the scores."""
        if self.visible is None:
            return None
        zeros = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
        return zeros.masked_fill_(~self.visible, -torch.inf)


def contiguous_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with the elements of a head adjacent in memory: kernels assume it, and the host's does not
    check."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return where parts of ``dtype`` are added up: float32 for halves, else the dtype itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class ComposedKernel:
    """Kernel of attention over one block of keys by scores, softmax and products in float32 at least. It holds a
    block's scores: give it few rows at a time. The other kernels have the same methods.

    Rows of the heads that share a key head are multiplied with it as one matrix, so that no key is repeated and the
    sum over the group in the gradient of a key comes with the product.
    """

    fused = False
    """Whether the kernel never holds the block's scores, so that an unmasked block of any size is one call."""

    def takes(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether it computes in this dtype and in heads of these widths."""
        return True

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, in the dtype of ``query``, and log-sum-exp. Those of a row that sees no key mean nothing.
        This kernel is not causal."""
        with without_autocast(query):
            scores = _scores(query, key, scoring)
            lse = scores.logsumexp(-1)
            finite = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
            output = _grouped(scores.sub_(finite).exp_(), key) @ value.to(scores.dtype)
        return output.reshape(*query.shape[:-1], -1).to(query.dtype), lse

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        scoring: Scoring,
    ) -> Gradients:
        """Return what this block adds to the gradients. ``output`` and ``lse`` are those over all keys of the rows, and
        with them a row that sees no key of this block adds nothing."""
        with without_autocast(query):
            scores, slope = _scores(query, key, scoring), None
            if scoring.softcap is not None:  # of tanh, by its result; none where a key is not seen
                slope = _grouped(1 - (scores / scoring.softcap).clamp_(min=-1).square_(), key)
            weights = _grouped(scores.sub_(lse.unsqueeze(-1)).exp_(), key)
            grad, output, wide_query, key, value = (t.to(weights.dtype) for t in (grad, output, query, key, value))
            delta = _grouped((grad * output).sum(-1, keepdim=True), key)
            grad = _grouped(grad, key)
            grad_value = weights.transpose(-1, -2) @ grad
            grad_scores = (grad @ value.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(scoring.scale)
            if slope is not None:
                grad_scores.mul_(slope)
            grad_query = (grad_scores @ key).reshape(query.shape)
            grad_key = grad_scores.transpose(-1, -2) @ _grouped(wide_query, key)
        return grad_query, grad_key, grad_value


def _scores(query: torch.Tensor, key: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """[batch, heads, rows, keys]"""
    assert not scoring.causal, "blocks are cut into rows for this kernel, and the cuts carry a mask"
    dtype = accumulation_dtype(query.dtype)
    scores = (_grouped(query.to(dtype), key) @ key.to(dtype).transpose(-1, -2)).mul_(scoring.scale)
    scores = scores.reshape(*query.shape[:-1], -1)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    return scores if scoring.visible is None else scores.masked_fill_(~scoring.visible, -torch.inf)


def _grouped(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[batch, heads, rows, …] to [batch, kv_heads, heads / kv_heads x rows, …]."""
    return tensor.reshape(tensor.shape[0], key.shape[1], -1, tensor.shape[-1])


class MaskedFlashKernel(ComposedKernel):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``: any float dtype, grouped heads, an additive mask."""

    fused = True

    def takes(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether values are as wide as queries, in any dtype."""
        return query.shape[-1] == value.shape[-1]

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what :meth:`ComposedKernel.forward` defines."""
        attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, scoring.causal, attn_mask=scoring.additive_mask(query.dtype), scale=scoring.scale
        )
        return cast(tuple[torch.Tensor, torch.Tensor], attended)

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        scoring: Scoring,
    ) -> Gradients:
        """Return what :meth:`ComposedKernel.backward` defines."""
        mask, scale = scoring.additive_mask(query.dtype), scoring.scale
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, lse, 0.0, scoring.causal, attn_mask=mask, scale=scale
        )
        return cast(Gradients, gradients)


class FlashOrEfficientKernel(ComposedKernel):
    """Flash attention in half precision without a mask, else memory-efficient attention.

    The latter knows no grouped heads, wants the rows of a bias 16 elements apart, and keeps log-sum-exps for a
    multiple of 32 rows. Its backward in half precision reads the output as its forward lays it out, and not by its
    strides. Both want heads a multiple of 8 wide, which ``F.scaled_dot_product_attention`` pads to.
    """

    fused = True

    def takes(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether heads are up to 256 wide, in float32 or a half type."""
        width = query.shape[-1]
        return (
            query.dtype in (torch.float32, *_HALF_TYPES)
            and width == value.shape[-1]
            and width % 8 == 0
            and width <= 256
        )

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what :meth:`ComposedKernel.forward` defines."""
        if scoring.visible is None and query.dtype in _HALF_TYPES:
            output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, scoring.causal, scale=scoring.scale
            )
            return output, lse
        key, value = _repeated(key, query), _repeated(value, query)
        bias = _bias(scoring, query)
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, scoring.causal, scale=scoring.scale
        )
        return output, lse[..., : query.shape[2]]

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        scoring: Scoring,
    ) -> Gradients:
        """Return what :meth:`ComposedKernel.backward` defines."""
        # State of the generator for dropout, of which there is none.
        seed = offset = torch.zeros((), dtype=torch.int64, device=query.device)
        if scoring.visible is None and query.dtype in _HALF_TYPES:
            flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
            lengths = (None, None, query.shape[2], key.shape[2])
            gradients = flash(
                *(grad, query, key, value, output, lse.contiguous(), *lengths),
                *(0.0, scoring.causal, seed, offset),
                scale=scoring.scale,
            )
            return cast(Gradients, gradients)
        padded = functional.pad(lse, (0, -lse.shape[-1] % 32))
        rows = output.transpose(1, 2)
        if not rows[0].is_contiguous():  # the kernel assumes that rows are heads x width elements apart
            output = rows.contiguous().transpose(1, 2)
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        grad_query, grad_key, grad_value, _ = efficient(
            *(grad, query, _repeated(key, query), _repeated(value, query), _bias(scoring, query)),
            *(output, padded),
            *(seed, offset, 0.0, [True, True, True, False], scoring.causal),
            scale=scoring.scale,
        )
        # Heads that shared a key: the gradient of repeating it.
        grad_key, grad_value = (
            grad.reshape(*shared.shape[:2], -1, *shared.shape[2:]).sum(2)
            for grad, shared in ((grad_key, key), (grad_value, value))
        )
        return grad_query, grad_key, grad_value


def _repeated(shared: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], dim=1)


def _bias(scoring: Scoring, query: torch.Tensor) -> torch.Tensor | None:
    """The mask for every head, in storage whose rows are 16 elements apart."""
    mask = scoring.additive_mask(query.dtype)
    if mask is None:
        return None
    keys = mask.shape[-1]
    return functional.pad(mask, (0, -keys % 16))[..., :keys].expand(*query.shape[:2], -1, -1)


_KERNELS: Mapping[str, ComposedKernel] = {
    "composed": ComposedKernel(),
    "masked_flash": MaskedFlashKernel(),
    "flash_or_efficient": FlashOrEfficientKernel(),
}
"""Kernels by the name that device profiles use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Rows see only the tokens directly before them."""

    length: int
    """Number of tokens that a row sees, itself included."""
    distance: int
    """Number of tokens from the block's first key to its first row."""

    def first_key(self, row: int) -> int:
        """Return the number of the first key that row number ``row`` sees; negative if it precedes the block."""
        return row + self.distance - self.length + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows of the local queries, and those of the keys passed with them that they attend to."""

    rows: slice
    keys: slice
    diagonal: bool = False
    """Row and key number ``i`` of the block are the same token, and later keys are hidden. The first block of a row is
    a diagonal one, in which the row sees at least itself."""
    documents: tuple[torch.Tensor, torch.Tensor] | None = None
    """Document ids [batch, rows] and [batch, keys]; None where all belong together."""
    window: Window | None = None
    """Window of the rows; None without one, and if each row's contains all keys of the block."""


def kernel_for(query: torch.Tensor, value: torch.Tensor, softcap: float | None = None) -> ComposedKernel:
    """Return the kernel that the device's profile names where it takes these tensors, else the composed one, as for
    scores with a ``softcap``.

    Estimates on the meta device meet a fused kernel, since real ones mostly do.
    """
    kernel = _KERNELS["masked_flash" if query.is_meta else profile_of(query.device).attention_kernel]
    return kernel if softcap is None and kernel.takes(query, value) else _KERNELS["composed"]


class MergedAttention:
    """Running output and log-sum-exp over the blocks so far, in at least float32.

    A new part with log-sum-exp b joins what has log-sum-exp a with the weight exp(b) / (exp(a) + exp(b)), which is
    sigmoid(b − a): no exponential overflows.
    """

    def __init__(self, query: torch.Tensor, value: torch.Tensor, scale: float, softcap: float | None = None) -> None:
        batch, heads, rows, _ = query.shape
        dtype = accumulation_dtype(query.dtype)
        self._kernel, self._query = kernel_for(query, value, softcap), query
        self._scoring = Scoring(scale=scale, softcap=softcap)
        # Heads innermost but one, as kernels leave it: the output projection then needs no copy.
        self._output = query.new_empty((batch, rows, heads, value.shape[-1]), dtype=dtype).transpose(1, 2)
        self._lse = query.new_empty((batch, heads, rows), dtype=dtype)

    def add(self, block: Block, key: torch.Tensor, value: torch.Tensor) -> None:
        """Attend to ``key`` and ``value`` where ``block`` says, and merge the result into its rows."""
        for rows, keys, scoring in _pieces(block, self._kernel, self._query, self._scoring):
            part, part_lse = self._kernel.forward(self._query[:, :, rows], key[:, :, keys], value[:, :, keys], scoring)
            output, lse = self._output[:, :, rows], self._lse[:, :, rows]
            if block.diagonal:
                output.copy_(part)
                lse.copy_(part_lse)
                continue
            if scoring.visible is not None:  # kernels disagree about rows that see nothing; one says 0
                part_lse = part_lse.masked_fill(~scoring.visible.any(-1), -torch.inf)
            output.lerp_(part.to(output.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
            torch.logaddexp(lse, part_lse, out=lse)

    def result(self, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output in the dtype of the queries, and log-sum-exp. The ``sinks`` [heads] are scores without a value."""
        if sinks is not None:
            scores = sinks.detach().to(self._lse.dtype).unsqueeze(-1)
            self._output.mul_(torch.sigmoid(self._lse - scores).unsqueeze(-1))
            torch.logaddexp(self._lse, scores, out=self._lse)
        return self._output.to(self._query.dtype), self._lse


def sink_gradients(grad: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradients of ``sinks`` [heads], from the output's and what :meth:`MergedAttention.result` gave."""
    shares = torch.exp(sinks.detach().to(lse.dtype).unsqueeze(-1) - lse)  # [batch, heads, rows]
    of_scores = shares * (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
    return of_scores.sum((0, 2)).neg().to(sinks.dtype)


class AttentionGradients:
    """Gradients over the blocks so far, summed in at least float32."""

    def __init__(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> None:
        self._kernel, self._scoring = kernel_for(query, value, softcap), Scoring(scale=scale, softcap=softcap)
        self._grad, self._rows_of = contiguous_heads(grad), (query, output, lse)
        self.query = torch.zeros_like(query, dtype=accumulation_dtype(query.dtype))

    def add(
        self,
        block: Block,
        key: torch.Tensor,
        value: torch.Tensor,
        grad_key: torch.Tensor,
        grad_value: torch.Tensor,
    ) -> None:
        """Add what ``block`` gives to :attr:`query` and, in place, to ``grad_key`` and ``grad_value``, which have the
        shapes of ``key`` and ``value``."""
        query, output, lse = self._rows_of
        for rows, keys, scoring in _pieces(block, self._kernel, query, self._scoring):
            parts = self._kernel.backward(
                self._grad[:, :, rows],
                query[:, :, rows],
                key[:, :, keys],
                value[:, :, keys],
                output[:, :, rows],
                lse[:, :, rows],
                scoring,
            )
            for total, part in zip(
                (self.query[:, :, rows], grad_key[:, :, keys], grad_value[:, :, keys]), parts, strict=True
            ):
                total.add_(part)


def _pieces(
    block: Block, kernel: ComposedKernel, query: torch.Tensor, scoring: Scoring
) -> Iterator[tuple[slice, slice, Scoring]]:
    """Split ``block`` by rows so that neither a mask nor the scores of an unfused kernel grow with the sequence."""
    if kernel.fused and block.documents is None and block.window is None:
        yield block.rows, block.keys, replace(scoring, causal=block.diagonal)
        return
    batch, heads = query.shape[:2]
    rows, keys = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
    step = max(_ROWS_AT_A_TIME, _ELEMENTS_AT_A_TIME // (batch * keys * (1 if kernel.fused else heads)))
    if block.window is not None:
        step = min(step, block_rows(block.window.length))
    starts = range(0, rows, step)
    if query.is_meta:  # there are no values to compute, and the fullest piece needs the memory that all need
        starts = range(max(0, rows - step), rows, step) if block.diagonal else starts[:1]
    for first in starts:
        last = min(first + step, rows)
        start = 0 if block.window is None else max(0, block.window.first_key(first))
        seen = slice(start, last if block.diagonal else keys)
        if start >= seen.stop:  # and so for the rows that follow
            return
        row = torch.arange(first, last, device=query.device)[:, None]
        key = torch.arange(start, seen.stop, device=query.device)
        masks = []
        if block.diagonal:
            masks.append((key <= row)[None, None])
        if block.window is not None:
            masks.append((key >= block.window.first_key(0) + row)[None, None])
        if block.documents is not None:
            of_rows, of_keys = block.documents
            masks.append(of_rows[:, None, first:last, None] == of_keys[:, None, None, seen])
        visible = functools.reduce(torch.logical_and, masks) if masks else None
        part_rows = slice(block.rows.start + first, block.rows.start + last)
        part_keys = slice(block.keys.start + start, block.keys.start + seen.stop)
        yield part_rows, part_keys, replace(scoring, visible=visible)
