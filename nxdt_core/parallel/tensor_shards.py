"""From a ``torch.nn`` module and a tensor style to the sharded module that takes its place."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from nxdt_core.errors import ShardDoesNotDivide, TensorPlanUnusable
from nxdt_core.nn.patterns import matches_any
from nxdt_core.parallel.mesh import ParallelMesh
from nxdt_core.parallel.tensor_heads import HeadLayout
from nxdt_core.parallel.tensor_layers import ColumnLinear, RowLinear
from nxdt_core.parallel.vocabulary_layers import SequenceEmbedding, VocabularyEmbedding, VocabularyHead
from nxdt_core.protocols.plan import ParallelPlan, TensorStyle

__all__ = ["TensorSharder"]


class TensorSharder:
    """Shards the modules of one pipeline stage; parameters that were one (tied) stay one."""

    def __init__(
        self, plan: ParallelPlan, mesh: ParallelMesh, heads: HeadLayout | None, *, sequence_parallel: bool
    ) -> None:
        group = mesh.group("tp")
        assert group is not None, "nothing to shard over"
        self._plan = plan
        self._mesh = mesh
        self._group = group
        self._heads = heads
        self._sequence_parallel = sequence_parallel
        self._sharded: dict[torch.Tensor, nn.Parameter] = {}

    def replacement(self, path: str, module: nn.Module, style: TensorStyle) -> nn.Module | None:
        """The module to put at ``path``; None where the one that is there may stay."""
        if style == "replicate":
            if self._sequence_parallel and type(module) is nn.Embedding:
                return SequenceEmbedding(module, self._group)
            return None
        if style == "vocab_embedding":
            return self._embedding(path, module)
        linear = _linear(path, module, style)
        if style == "column":
            return self._column(path, linear)
        if style == "row":
            return self._row(path, linear)
        self._check(path, linear.out_features, "rows of the vocabulary")
        return VocabularyHead(self._cut(linear.weight, 0), self._cut_bias(linear.bias), self._mesh.mesh("tp"))

    def _column(self, path: str, linear: nn.Linear) -> ColumnLinear:
        heads = self._plan.heads
        key_value = heads is not None and matches_any(heads.key_value, path)
        if key_value and self._heads is not None and self._heads.kv_replicas > 1:
            return ColumnLinear(self._cut_heads(linear.weight), self._cut_head_bias(linear.bias))
        self._check(path, linear.out_features, "output features")
        return ColumnLinear(self._cut(linear.weight, 0), self._cut_bias(linear.bias))

    def _row(self, path: str, linear: nn.Linear) -> RowLinear:
        self._check(path, linear.in_features, "input features")
        weight = self._cut(linear.weight, 1)
        return RowLinear(weight, linear.bias, self._group, sequence_parallel=self._sequence_parallel)

    def _embedding(self, path: str, module: nn.Module) -> VocabularyEmbedding:
        if type(module).forward is not nn.Embedding.forward or not isinstance(module, nn.Embedding):
            raise TensorPlanUnusable(problem=f"'{path}' is vocab_embedding and no torch.nn.Embedding")
        unsupported = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        if unsupported:
            raise TensorPlanUnusable(
                problem=f"the embedding '{path}' has max_norm, scale_grad_by_freq or sparse, which is not sharded"
            )
        self._check(path, module.num_embeddings, "rows of the vocabulary")
        return VocabularyEmbedding(
            self._cut(module.weight, 0),
            self._group,
            padding_idx=module.padding_idx,
            sequence_parallel=self._sequence_parallel,
        )

    def _check(self, path: str, size: int, features: str) -> None:
        if size % self._group.size():
            raise ShardDoesNotDivide(module=path, size=size, features=features, tp=self._group.size())

    def _cut(self, parameter: torch.Tensor, dim: int) -> nn.Parameter:
        """This rank's part along ``dim``."""
        return self._once(parameter, self._mesh.mesh("tp"), (Shard(dim),), dim, self._group.size(), self._group.rank())

    def _cut_bias(self, bias: torch.Tensor | None) -> nn.Parameter | None:
        return None if bias is None else self._cut(bias, 0)

    def _cut_heads(self, parameter: torch.Tensor) -> nn.Parameter:
        """This rank's key and value head, of which its neighbours hold copies."""
        mesh = self._mesh.mesh("tp_kv", "tp_kv_replica")
        parts, part = self._mesh.size("tp_kv"), self._mesh.rank("tp_kv")
        return self._once(parameter, mesh, (Shard(0), Replicate()), 0, parts, part)

    def _cut_head_bias(self, bias: torch.Tensor | None) -> nn.Parameter | None:
        return None if bias is None else self._cut_heads(bias)

    def _once(
        self,
        parameter: torch.Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        dim: int,
        parts: int,
        part: int,
    ) -> nn.Parameter:
        known = self._sharded.get(parameter)
        if known is not None:
            return known
        size = parameter.shape[dim] // parts
        local = parameter.detach().narrow(dim, part * size, size).clone(memory_format=torch.contiguous_format)
        sharded = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        self._sharded[parameter] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        return self._sharded[parameter]


def _linear(path: str, module: nn.Module, style: TensorStyle) -> nn.Linear:
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return module
    raise TensorPlanUnusable(problem=f"'{path}' is {style} and no torch.nn.Linear, but {type(module).__name__}")
