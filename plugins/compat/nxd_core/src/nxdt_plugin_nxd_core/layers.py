"""NxD Core's tensor parallel layers, whole on the rank that builds them, and the parallel plan of a module with them.

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

from nxdt_core.engine.loss import vocabulary_parallel_cross_entropies
from nxdt_core.models.updates import UpdatedEmbedding, UpdatedLinear
from nxdt_core.protocols.plan import AttentionHeads, ParallelPlan, PipelinePlan, TensorStyle
from nxdt_plugin_nxd_core.arguments import binds, expect, refused
from nxdt_plugin_nxd_core.config import RECOMPUTED, NxDConfig, current_config
from nxdt_plugin_nxd_core.errors import LayersNotFound, StageModuleMisplaced

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
        method = None if init_method is nn.init.normal_ else init_method
        _complete(self, method, sequence_parallel_enabled, sequence_dimension)


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
        self.kv_size_multiplier, self.gather_output = kv_size_multiplier, gather_output
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


@binds
def parallel_cross_entropy(vocab_parallel_logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each target, 0 where it is −100.

    Args:
        vocab_parallel_logits: [..., vocab / tp], what a ``ColumnParallelLinear`` with ``gather_output=False`` gives.
        target: int64 [...].
    """
    shape, expected = tuple(target.shape), tuple(vocab_parallel_logits.shape[:-1])
    what = f"of the shape {expected} of the logits without their last dimension"
    expect("parallel_cross_entropy", "target", shape, what, when=shape == expected)
    config = current_config()
    mesh = None if config is None or config.model is None else config.mesh
    if mesh is not None and mesh["tp"].size() > 1:
        from torch.distributed.tensor import DTensor, Shard  # half a CPU-second that one process does not need

        columns = [Shard(vocab_parallel_logits.ndim - 1)]
        vocab_parallel_logits = DTensor.from_local(vocab_parallel_logits, mesh["tp"], columns, run_check=False)
    return vocabulary_parallel_cross_entropies(vocab_parallel_logits, target)


def plan_of(module: nn.Module, config: NxDConfig) -> ParallelPlan:
    """Return the plan of ``module``."""
    tp, stages, sequence_parallel = config["tensor_parallel_size"], config.stages, config["sequence_parallel"]
    recompute, layer_class = config["activation_checkpoint_config"], config.pipeline["transformer_layer_cls"]
    whole = {"gather_output": True, "input_is_parallel": False}
    for path, part in module.named_modules():
        if max(tp, stages) > 1 and isinstance(part, UpdatedLinear | UpdatedEmbedding):
            raise refused("LoRAModel", "module", repr(path))
        is_layer = not sequence_parallel or isinstance(part, nn.Linear | GQAQKVColumnParallelLinear)
        wrong = whole if sequence_parallel else {"sequence_parallel_enabled": True}
        for argument, value in wrong.items() if tp > 1 and is_layer else ():
            if getattr(part, argument, None) is value:
                raise refused(f"the layer '{path}'", argument, value)

    # The list of layers: that of the class, or without one the longest list of one class.
    lists: dict[str, int] = {}
    for path, part in module.named_modules():
        kinds = {type(child) for child in part.children()}
        if not isinstance(part, nn.ModuleList | nn.ModuleDict) or any(path.startswith(f"{outer}.") for outer in lists):
            continue
        if len(kinds) == 1 if layer_class is None else kinds and all(issubclass(kind, layer_class) for kind in kinds):
            lists[path] = len([*part.children()])
    layers = max(lists, key=lists.__getitem__) if lists else None
    if layers is None and (stages > 1 or recompute == "full"):
        what = "A pipeline" if stages > 1 else "activation_checkpoint_config='full'"
        name = "modules of one class" if layer_class is None else layer_class.__name__
        raise LayersNotFound(wanted=what, found=f"{type(module).__name__} has no ModuleList of {name}")

    # Modules with parameters that were registered before the layers run before them, and those behind after them.
    pipeline = None
    if stages > 1 and layers is not None:
        first: list[str] = []
        last: list[str] = []
        parts = layers.split(".")
        for depth, component in enumerate(parts):
            outer = ".".join(parts[:depth])
            parent, prefix = module.get_submodule(outer), f"{outer}." if outer else ""
            for name, _ in parent.named_parameters(recurse=False):
                raise StageModuleMisplaced(path=prefix + name, reason="is a parameter of the module around the layers")
            behind = False
            for name, child in parent.named_children():
                if name == component:
                    behind = True
                elif next(child.parameters(), None) is not None:
                    (last if behind else first).append(prefix + name)
        names = ("hidden_size", "n_embd", "d_model", "dim")  # as Hugging Face's models call it
        of_config = (getattr(getattr(module, "config", None), name, None) for name in names)
        before = [part for name in first for part in module.get_submodule(name).modules()]
        of_tables = (part.embedding_dim for part in before if isinstance(part, nn.Embedding))
        sizes = (config.pipeline["hidden_size"], *of_config, *of_tables)
        width = next((size for size in sizes if type(size) is int), None)
        if width is None:
            raise refused("neuronx_distributed_config", "pipeline_config['hidden_size']", None)
        pipeline = PipelinePlan(hidden_size=width, first=tuple(first), layers=layers, last=tuple(last))

    styles: dict[str, TensorStyle] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, ColumnParallelLinear):
            styles[path] = "column_whole" if part.gather_output else "column"
        elif isinstance(part, RowParallelLinear):
            styles[path] = "row" if part.input_is_parallel else "row_split"
        elif isinstance(part, ParallelEmbedding):
            styles[path] = "vocab_embedding"
    fused = {path: part for path, part in module.named_modules() if isinstance(part, GQAQKVColumnParallelLinear)}
    within = tuple(f"{path}." for path in fused)
    blocks = [path for path, style in styles.items() if style != "vocab_embedding" and not path.startswith(within)]
    if sequence_parallel:  # other tables look up this rank's part of the sequence
        tables = [path for path, part in module.named_modules() if isinstance(part, nn.Embedding)]
        styles = {**dict.fromkeys(tables, "replicate"), **styles}
    recomputed = () if recompute in (None, "full") else recompute
    selected = tuple(path for path, part in module.named_modules() if isinstance(part, recomputed))
    owners: dict[int, str] = {}
    named = [(owners.setdefault(id(p), name), name) for name, p in module.named_parameters(remove_duplicate=False)]

    # Groups of ranks that hold copies of key and value features are heads of one group a rank.
    heads, multipliers = None, {part.kv_size_multiplier for part in fused.values()}
    if tp > 1 and multipliers - {1}:
        multiplier = max(multipliers)
        if len(multipliers) > 1 or tp % multiplier:
            raise refused("GQAQKVColumnParallelLinear", "kv_size_multiplier", sorted(multipliers), tp=tp)
        heads = AttentionHeads(
            query_heads=tp,
            kv_heads=tp // multiplier,
            query=tuple(f"{path}.q" for path in fused),
            key_value=tuple(f"{path}.{name}" for path in fused for name in ("k", "v")),
            output=tuple(path for path, style in styles.items() if style == "row"),
        )
    return ParallelPlan(
        tensor=styles,
        tensor_blocks=(*blocks, *fused),
        heads=heads,
        pipeline=pipeline,
        recompute={RECOMPUTED: selected} if recomputed else {},
        recompute_layer="layers.*" if layers is None else f"{layers}.*",
        tied=tuple((owner, user) for owner, user in named if owner != user),
    )
