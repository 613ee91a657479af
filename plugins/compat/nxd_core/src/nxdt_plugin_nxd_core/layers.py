"""NxD Core's tensor parallel layers: whole on the rank that builds them, sharded by ``initialize_parallel_model``.

A layer is the ``torch.nn`` layer that it extends, with what it says of its shards. So a module with such layers is
an ordinary module in one process, and each layer is by itself a tensor block of the engine: what goes into a
``ColumnParallelLinear`` is whole, and a ``RowParallelLinear`` makes it whole again.

All take ``dtype`` and ``device`` of the weights, ``init_method``, which is called with each weight, and
``sequence_dimension``, which is 1, since hidden states are [batch, seq, hidden]. ``sequence_parallel_enabled`` is
informative: ``neuronx_distributed_config(sequence_parallel=True)`` decides for the whole model. Sizes are those of all
ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nxdt_plugin_nxd_core.arguments import binds, expect, refused

InitMethod = Callable[[torch.Tensor], Any]


class ColumnParallelLinear(nn.Linear):
    """A linear layer whose output features are sharded; ``gather_output`` gives each rank those of all ranks."""

    @binds
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
    ) -> None:
        super().__init__(input_size, output_size, bias=bias, dtype=dtype, device=device)
        self.gather_output = gather_output
        _complete(self, init_method, sequence_parallel_enabled, sequence_dimension)


class RowParallelLinear(nn.Linear):
    """A linear layer whose input features are sharded; its products are summed over the ranks, then the bias is added.

    With ``input_is_parallel`` the input is this rank's part, as a ``ColumnParallelLinear`` with ``gather_output=False``
    gives it. Otherwise it is whole, and each rank takes its part.
    """

    @binds
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
    ) -> None:
        super().__init__(input_size, output_size, bias=bias, dtype=dtype, device=device)
        self.input_is_parallel = input_is_parallel
        _complete(self, init_method, sequence_parallel_enabled, sequence_dimension)


class ParallelEmbedding(nn.Embedding):
    """An embedding whose rows are sharded; each rank looks up its own, and their sum is whole on each rank."""

    @binds
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        init_method: InitMethod = nn.init.normal_,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
    ) -> None:
        inside = padding_idx is None or (type(padding_idx) is int and -num_embeddings <= padding_idx < num_embeddings)
        expect("ParallelEmbedding", "padding_idx", padding_idx, f"a row of the {num_embeddings}", when=inside)
        super().__init__(num_embeddings, embedding_dim, padding_idx=padding_idx, device=device, dtype=dtype)
        own = None if init_method is nn.init.normal_ else init_method
        _complete(self, own, sequence_parallel_enabled, sequence_dimension)


class GQAQKVColumnParallelLinear(nn.Module):
    """Projections of grouped-query attention: ``(q, k, v) = layer(hidden)``, each this rank's features.

    The parameters are those of its children ``q``, ``k`` and ``v``. Under tensor parallelism neighbouring ranks hold
    copies of the key and value features, as many as ``kv_size_multiplier`` says.

    Args:
        output_sizes: output features of the query and of the key (which are those of the value), of all ranks
            together, without the copies.
        gather_output: give each rank the features of all ranks; not with copies.
    """

    @binds
    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = True,
        sequence_parallel_enabled: bool = False,
        init_method: InitMethod | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        kv_size_multiplier: int = 1,
        sequence_dimension: int | None = None,
    ) -> None:
        super().__init__()
        if gather_output and kv_size_multiplier > 1:
            raise refused("GQAQKVColumnParallelLinear", "gather_output", True, copies=kv_size_multiplier)
        self.kv_size_multiplier = kv_size_multiplier
        self.gather_output = gather_output
        query, key = output_sizes
        self.q, self.k, self.v = (
            ColumnParallelLinear(input_size, size, bias, gather_output, dtype, device, init_method=init_method)
            for size in (query, key, key)
        )
        _complete(self, None, sequence_parallel_enabled, sequence_dimension)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[batch, seq, input_size] to the queries, keys and values, [batch, seq, features] each."""
        return self.q(hidden), self.k(hidden), self.v(hidden)


def _complete(layer: Any, init_method: InitMethod | None, sequence_parallel: bool, sequence_dimension: Any) -> None:
    layer.sequence_parallel_enabled = sequence_parallel
    if sequence_parallel and sequence_dimension != 1:
        raise refused(type(layer).__name__, "sequence_dimension", sequence_dimension)
    if init_method is not None:
        with torch.no_grad():
            init_method(layer.weight)
            if getattr(layer, "bias", None) is not None:
                layer.bias.zero_()
