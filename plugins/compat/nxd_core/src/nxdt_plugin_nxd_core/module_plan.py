"""The parallel plan of a module, read off its layers."""

from __future__ import annotations

from torch import nn

from nxdt_core.models.updates import UpdatedEmbedding, UpdatedLinear
from nxdt_core.protocols.plan import AttentionHeads, ParallelPlan, PipelinePlan, TensorStyle
from nxdt_plugin_nxd_core.arguments import error_of, refused
from nxdt_plugin_nxd_core.config import RECOMPUTED, NxDConfig
from nxdt_plugin_nxd_core.errors import LayersNotFound, StageModuleMisplaced
from nxdt_plugin_nxd_core.layers import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)

_HIDDEN_SIZES = ("hidden_size", "n_embd", "d_model", "dim")
"""Attributes of a ``config`` that say how wide hidden states are, as Hugging Face's models call them."""


def plan_of(module: nn.Module, config: NxDConfig) -> ParallelPlan:
    """Return the plan of ``module``."""
    tp, stages, sequence_parallel = config["tensor_parallel_size"], config.stages, config["sequence_parallel"]
    recompute, layer_class = config["activation_checkpoint_config"], config.pipeline["transformer_layer_cls"]
    for path, part in module.named_modules():
        if max(tp, stages) > 1 and isinstance(part, UpdatedLinear | UpdatedEmbedding):
            raise refused("LoRAModel", "module", repr(path))
        if tp == 1:
            continue
        reason, wrong = "is set, and sequence parallelism is off", {"sequence_parallel_enabled": True}
        advice = "Pass sequence_parallel=True to neuronx_distributed_config."
        if sequence_parallel:
            reason = "gives or takes all features of whole sequences, and sequence parallelism is on"
            advice = "Pass gather_output=False to columns and input_is_parallel=True to rows."
            is_layer = isinstance(part, nn.Linear | GQAQKVColumnParallelLinear)
            wrong = {"gather_output": True, "input_is_parallel": False} if is_layer else {}
        for argument, value in wrong.items():
            if getattr(part, argument, None) is value:
                raise error_of(f"the layer '{path}'", argument, str(value), reason, advice)

    # The list of layers: that of the class, or without one the longest list of one class.
    lists: dict[str, int] = {}
    for path, part in module.named_modules():
        kinds = {type(child) for child in part.children()}
        if not isinstance(part, nn.ModuleList | nn.ModuleDict) or any(path.startswith(f"{each}.") for each in lists):
            continue
        if len(kinds) == 1 if layer_class is None else kinds and all(issubclass(kind, layer_class) for kind in kinds):
            lists[path] = len([*part.children()])
    layers = max(lists, key=lists.__getitem__) if lists else None
    if layers is None and (stages > 1 or recompute == "full"):
        wanted = "A pipeline" if stages > 1 else "activation_checkpoint_config='full'"
        name = "modules of one class" if layer_class is None else layer_class.__name__
        raise LayersNotFound(wanted=wanted, found=f"{type(module).__name__} has no ModuleList of {name}")

    styles: dict[str, TensorStyle] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, ColumnParallelLinear):
            styles[path] = "column_whole" if part.gather_output else "column"
        elif isinstance(part, RowParallelLinear):
            styles[path] = "row" if part.input_is_parallel else "row_split"
        elif isinstance(part, ParallelEmbedding):
            styles[path] = "vocab_embedding"
    fused = {path: part for path, part in module.named_modules() if isinstance(part, GQAQKVColumnParallelLinear)}
    blocks = [
        path
        for path, style in styles.items()
        if style != "vocab_embedding" and not any(path.startswith(f"{outer}.") for outer in fused)
    ]
    if sequence_parallel:  # other tables look up this rank's part of the sequence
        tables = [path for path, part in module.named_modules() if isinstance(part, nn.Embedding)]
        styles = {**dict.fromkeys(tables, "replicate"), **styles}
    chosen = {}
    if recompute is not None and recompute != "full":
        chosen[RECOMPUTED] = tuple(name for name, part in module.named_modules() if isinstance(part, recompute))
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
        pipeline=None if stages == 1 or layers is None else _pipeline(module, layers, config.pipeline["hidden_size"]),
        recompute=chosen,
        recompute_layer="layers.*" if layers is None else f"{layers}.*",
        tied=tuple((owner, user) for owner, user in named if owner != user),
    )


def _pipeline(module: nn.Module, layers: str, hidden_size: int | None) -> PipelinePlan:
    # Modules with parameters that were registered before the layers run before them, and those behind after them.
    first: list[str] = []
    last: list[str] = []
    parts = layers.split(".")
    for depth, own in enumerate(parts):
        outer = ".".join(parts[:depth])
        parent, prefix = module.get_submodule(outer), f"{outer}." if outer else ""
        for name, _ in parent.named_parameters(recurse=False):
            raise StageModuleMisplaced(path=prefix + name, reason="is a parameter of the module around the layers")
        behind = False
        for name, child in parent.named_children():
            if name == own:
                behind = True
            elif next(child.parameters(), None) is not None:
                (last if behind else first).append(prefix + name)
    tables = [part for name in first for part in module.get_submodule(name).modules() if isinstance(part, nn.Embedding)]
    known = [getattr(getattr(module, "config", None), name, None) for name in _HIDDEN_SIZES]
    sizes = [size for size in (hidden_size, *known, *(table.embedding_dim for table in tables)) if type(size) is int]
    if not sizes:
        raise refused("neuronx_distributed_config", "pipeline_config['hidden_size']", None)
    return PipelinePlan(hidden_size=sizes[0], first=tuple(first), layers=layers, last=tuple(last))
