"""Layers with a slot for an update: what an adapter adds to a linear layer, an embedding or experts.

A layer keeps its path and the names of its parameters; those of the update are below ``update`` (``q_proj.update.…``;
of experts below ``updates.<matrix>``). Engines shard an update with its layer, by what it says in ``sharded_like``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.distributed.devices import meta_device

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Product of inputs [..., in] and a weight [out, in]: [..., out]."""


@contextmanager
def updates_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Switch the updates in ``modules`` off within the block: the model is the frozen base."""
    updates = [part for module in modules for part in module.modules() if isinstance(part, Update)]
    try:
        for update in updates:
            update.enabled = False
        yield
    finally:
        for update in updates:
            update.enabled = True


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Return what fills a slot of :class:`Update` in one process."""
    return tensor


class Update(nn.Module):
    """Base of updates. ``forward(inputs, product, weight)`` returns what the layer gives instead of ``product``.

    Of a linear layer ``inputs`` are [..., in] and ``product`` [..., out], without the bias; of an embedding ``inputs``
    are row numbers; of experts it is called as ``(rows, product, weight, groups)``, as
    :func:`nxdt_core.models.moe.experts.grouped_linear` is. Where a layer is cut, all these are this process's parts:
    of one cut by input features, ``product`` and what is returned are parts of a sum over the processes.
    """

    sharded_like: Mapping[str, int] = {}
    """Parameter → the dimension that it shares with the layer's weight, at the same place in both; where the weight is
    cut along that, so is the parameter. One that is named nowhere is never cut."""
    inputs: int = 1
    """The dimension of the layer's weight that its inputs are multiplied along: 1 of [out, in], 0 of a table."""
    reads_weight: bool = True
    """False where ``forward`` does not read ``weight``. Engines may then gather the weight in the dtype that products
    cast it to."""

    def __call__(self, inputs: torch.Tensor, product: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Return what ``forward`` does; within :func:`updates_off`, return ``product`` unchanged."""
        if not self.enabled:
            return product
        updated: torch.Tensor = super().__call__(inputs, product, *more)
        return updated

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        """False within :func:`updates_off`, where the update is not computed."""
        self.local: Callable[[torch.Tensor], torch.Tensor] = unchanged
        """A slot: this process's part of a parameter."""
        self.over_inputs: Callable[[torch.Tensor], torch.Tensor] = unchanged
        """A slot: the sum over the processes that share the input features of the layer; not differentiable."""


class ProductLinear(nn.Linear):
    """A linear layer with the parameters of another one and a slot for the product of inputs and weight."""

    def __init__(self, linear: nn.Linear, product: Product = functional.linear) -> None:
        with meta_device():
            super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.weight = linear.weight
        if linear.bias is not None:
            self.bias = linear.bias
        self.product = product
        self.update: Update | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        """[..., in] to [..., out]."""
        return updated_linear(input, self.weight, self.bias, self.update, product=self.product)


class UpdatedLinear(ProductLinear):
    """A linear layer with the parameters of another one and an update."""

    def __init__(self, linear: nn.Linear, update: Update) -> None:
        super().__init__(linear)
        self.update = update


class UpdatedEmbedding(nn.Embedding):
    """An embedding with the table of another one and an update."""

    def __init__(self, embedding: nn.Embedding, update: Update) -> None:
        with meta_device():
            super().__init__(
                embedding.num_embeddings,
                embedding.embedding_dim,
                embedding.padding_idx,
                embedding.max_norm,
                embedding.norm_type,
                embedding.scale_grad_by_freq,
                embedding.sparse,
            )
        self.weight = embedding.weight
        self.update = update

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        """Return the updated rows [..., width] of ids, int64 [...]."""
        return self.update(input, super().forward(input), self.weight)


def updated_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    update: nn.Module | None,
    *,
    product: Product = functional.linear,
) -> torch.Tensor:
    """Return the product of inputs and weight, by default ``functional.linear``, with the update (if any) before the
    bias."""
    if update is None and product is functional.linear:
        return functional.linear(hidden, weight, bias)
    result = product(hidden, weight)
    if update is not None:
        result = update(hidden, result, weight)
    return result if bias is None else result + bias
