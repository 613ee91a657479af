"""NxD Core's tensor parallel layers: whole on the rank that builds them, sharded by ``initialize_parallel_model``.

A layer is the ``torch.nn`` layer that it extends, with what it says of its shards. So a module with such layers is
an ordinary module in one process, and each layer is by itself a tensor block of the engine: what goes into a
``ColumnParallelLinear`` is whole, and a ``RowParallelLinear`` makes it whole again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdt_plugin_nxd_core.arguments import binds, expect, refused

__all__ = [
    "ColumnParallelLinear",
    "GQAQKVColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
]

InitMethod = Callable[[torch.Tensor], Any]

SEQUENCE_DIM = 1


class ColumnParallelLinear(nn.Linear):
    """A linear layer whose output features are sharded.

    Args:
        input_size: input features.
        output_size: output features, of all ranks together.
        bias: whether there is one.
        gather_output: give each rank the features of all ranks.
        dtype: dtype of the weights.
        device: on which the weights are built; the engine moves them.
        init_method: called with the weight; the default is that of ``torch.nn.Linear``.
        sequence_parallel_enabled: informative; ``neuronx_distributed_config(sequence_parallel=True)`` decides for the
            whole model.
        sequence_dimension: hidden states are [batch, seq, hidden], so that 1 is the only one.
        skip_bias_add, pad, stride, keep_master_weight, tensor_model_parallel_group, reduce_dtype, rank_ordering: as
            NxD Core's; what has no counterpart is refused.

    Raises:
        ArgumentMeansNothing: an argument asks for what this engine does not do.
    """

    @binds(keep_master_weight="shards are cut from the whole weight")
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype | None = None,
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        name = type(self).__name__
        _check_sizes(name, input_size=input_size, output_size=output_size)
        _check_weights(name, dtype, init_method)
        _refuse(name, stride=stride, skip_bias_add=skip_bias_add, pad=pad)
        _refuse(name, tensor_model_parallel_group=tensor_model_parallel_group, rank_ordering=rank_ordering)
        _check_sequence_dimension(name, sequence_parallel_enabled, sequence_dimension)
        super().__init__(input_size, output_size, bias=bias, dtype=dtype, device=device)
        self.gather_output = gather_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        _initialise(self, init_method)


class RowParallelLinear(nn.Linear):
    """A linear layer whose input features are sharded; its products are summed over the ranks.

    Args:
        input_size: input features, of all ranks together.
        output_size: output features.
        bias: whether there is one; it is added once, after the sum.
        input_is_parallel: whether the input is this rank's part, as a ``ColumnParallelLinear`` with
            ``gather_output=False`` gives it; otherwise it is whole, and each rank takes its part.
        dtype, device, init_method, sequence_parallel_enabled, sequence_dimension: as for
            :class:`ColumnParallelLinear`.
        stride, keep_master_weight, skip_bias_add, pad, reduce_output, tensor_model_parallel_group, reduce_dtype,
            rank_ordering: as NxD Core's; what has no counterpart is refused.

    Raises:
        ArgumentMeansNothing: an argument asks for what this engine does not do.
    """

    @binds(keep_master_weight="shards are cut from the whole weight")
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype | None = None,
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        name = type(self).__name__
        _check_sizes(name, input_size=input_size, output_size=output_size)
        _check_weights(name, dtype, init_method)
        _refuse(name, stride=stride, skip_bias_add=skip_bias_add, pad=pad, reduce_output=reduce_output)
        _refuse(name, tensor_model_parallel_group=tensor_model_parallel_group, rank_ordering=rank_ordering)
        _check_sequence_dimension(name, sequence_parallel_enabled, sequence_dimension)
        super().__init__(input_size, output_size, bias=bias, dtype=dtype, device=device)
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel_enabled = sequence_parallel_enabled
        _initialise(self, init_method)


class ParallelEmbedding(nn.Embedding):
    """An embedding whose rows are sharded; each rank looks up its own, and their sum is whole on each rank.

    Args:
        num_embeddings: rows, of all ranks together.
        embedding_dim: features.
        padding_idx: as for ``torch.nn.Embedding``.
        init_method: called with the weight; the default is that of ``torch.nn.Embedding``.
        device, dtype, sequence_parallel_enabled, sequence_dimension: as for :class:`ColumnParallelLinear`.
        max_norm, norm_type, scale_grad_by_freq, sparse, shard_across_embedding, pad, collect_output,
            tensor_model_parallel_group, rank_ordering: as NxD Core's; what has no counterpart is refused.

    Raises:
        ArgumentMeansNothing: an argument asks for what this engine does not do.
    """

    @binds()
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = nn.init.normal_,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        collect_output: bool = True,
        tensor_model_parallel_group: Any = None,
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        name = type(self).__name__
        _check_sizes(name, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        _check_weights(name, dtype, init_method)
        inside = padding_idx is None or (type(padding_idx) is int and -num_embeddings <= padding_idx < num_embeddings)
        expect(name, "padding_idx", padding_idx, f"a row of the {num_embeddings}", when=inside)
        _refuse(name, max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        _refuse(name, shard_across_embedding=shard_across_embedding, pad=pad, collect_output=collect_output)
        _refuse(name, tensor_model_parallel_group=tensor_model_parallel_group, rank_ordering=rank_ordering)
        _check_sequence_dimension(name, sequence_parallel_enabled, sequence_dimension)
        super().__init__(num_embeddings, embedding_dim, padding_idx=padding_idx, device=device, dtype=dtype)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        if init_method is not nn.init.normal_:
            with torch.no_grad():
                init_method(self.weight)


class GQAQKVColumnParallelLinear(nn.Module):
    """Projections of grouped-query attention: ``(q, k, v) = layer(hidden)``, each this rank's features.

    The parameters are those of its children ``q``, ``k`` and ``v``. Under tensor parallelism neighbouring ranks hold
    copies of the key and value features, as many as ``kv_size_multiplier`` says.

    Args:
        input_size: input features.
        output_sizes: output features of the query and of the key (which are those of the value), of all ranks
            together, without the copies.
        bias: whether the projections have one.
        gather_output: give each rank the features of all ranks.
        sequence_parallel_enabled, dtype, device: as for :class:`ColumnParallelLinear`.
        init_method: called with each of the three weights.
        kv_size_multiplier: number of ranks that hold copies of the same key and value features.
        fuse_qkv: informative: the three matrices have one input gather, and checkpoints hold them apart.

    Raises:
        ArgumentMeansNothing: an argument asks for what this engine does not do.
    """

    @binds(fuse_qkv="one input gather serves three matrices")
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
        fuse_qkv: bool = True,
        sequence_dimension: int | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        _check_sizes(name, kv_size_multiplier=kv_size_multiplier)
        listed = isinstance(output_sizes, list | tuple)
        expect(name, "output_sizes", output_sizes, "a list of two sizes", when=listed)
        if len(output_sizes) != 2:
            reason = "does not name two sizes"
            advice = "Give [query_features, key_features]; the value has as many as the key."
            raise refused(name, "output_sizes", str(list(output_sizes)), reason, advice)
        if gather_output and kv_size_multiplier > 1:
            reason = f"would gather {kv_size_multiplier} copies of each key and value"
            advice = "Set gather_output=False: attention needs the features of the rank's own heads."
            raise refused(name, "gather_output", "True", reason, advice)
        _check_sequence_dimension(name, sequence_parallel_enabled, sequence_dimension)
        query, key = output_sizes
        self.kv_size_multiplier = kv_size_multiplier
        self.gather_output = gather_output
        self.q, self.k, self.v = (
            ColumnParallelLinear(
                input_size,
                size,
                bias=bias,
                gather_output=gather_output,
                dtype=dtype,
                device=device,
                init_method=init_method,
            )
            for size in (query, key, key)
        )

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[batch, seq, input_size] to the queries, keys and values, [batch, seq, features] each."""
        return self.q(hidden), self.k(hidden), self.v(hidden)


def _initialise(layer: nn.Linear, init_method: InitMethod | None) -> None:
    if init_method is None:
        return
    with torch.no_grad():
        init_method(layer.weight)
        if layer.bias is not None:
            layer.bias.zero_()


def _check_sizes(layer: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        expect(layer, name, size, "an integer of at least 1", when=type(size) is int and size >= 1)


def _check_weights(layer: str, dtype: Any, init_method: Any) -> None:
    expect(layer, "dtype", dtype, "a torch.dtype", when=isinstance(dtype, torch.dtype))
    expect(layer, "init_method", init_method, "a function", when=init_method is None or callable(init_method))


_OF_TABLES = "Leave it out: a sharded table cannot follow it."
_ONLY: Mapping[str, tuple[object, str]] = {
    "stride": (1, "Leave it out: fused matrices are separate layers here, such as gate_proj and up_proj."),
    "skip_bias_add": (False, "Leave it out, and add the bias in the layer."),
    "pad": (False, "Leave it out, and choose sizes that the tensor parallel size divides."),
    "reduce_output": (True, "Leave it out: the layer's output is the sum over the ranks."),
    "shard_across_embedding": (False, "Leave it out: tables are sharded by row."),
    "collect_output": (True, "Leave it out: the layer's output is the sum over the ranks."),
    "tensor_model_parallel_group": (None, "Leave it out: the group is that of neuronx_distributed_config."),
    "rank_ordering": (None, "Leave it out: ranks follow each other."),
    "max_norm": (None, _OF_TABLES),
    "scale_grad_by_freq": (False, _OF_TABLES),
    "sparse": (False, _OF_TABLES),
}
"""Arguments that have one value here, and what to do about another one."""


def _refuse(layer: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        only, advice = _ONLY[name]
        if value != only:
            raise refused(layer, name, repr(value), "has no counterpart", advice)


def _check_sequence_dimension(layer: str, enabled: bool, dimension: int | None) -> None:
    if enabled and dimension != SEQUENCE_DIM:
        reason = "is not the dimension that sequence parallelism shards here; hidden states are [batch, seq, hidden]"
        advice = "Pass sequence_dimension=1, and leave out transposes to [seq, batch, hidden]."
        raise refused(layer, "sequence_dimension", repr(dimension), reason, advice)
