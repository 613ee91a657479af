"""The parallel plan of a module, read off its layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from nxdt_core.models.updates import UpdatedEmbedding, UpdatedLinear
from nxdt_core.protocols.plan import AttentionHeads, ParallelPlan, PipelinePlan, TensorStyle
from nxdt_plugin_nxd_core.arguments import refused
from nxdt_plugin_nxd_core.errors import LayersNotFound, StageModuleMisplaced
from nxdt_plugin_nxd_core.layers import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)

__all__ = ["RECOMPUTED", "PlanWishes", "find_layers", "plan_of"]


RECOMPUTED = "selected"
"""Name, in ``ParallelPlan.recompute``, of the modules of the class that the caller names."""

_WHOLE: TensorStyle = "replicate"

_HIDDEN_SIZES = ("hidden_size", "n_embd", "d_model", "dim")
"""Attributes of a ``config`` that say how wide hidden states are, as Hugging Face's models call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWishes:
    """What the configuration says of the plan."""

    stages: int = 1
    tensor_parallel: int = 1
    layer_class: type[nn.Module] | None = None
    hidden_size: int | None = None
    recompute_layers: bool = False
    recompute_class: type[nn.Module] | tuple[type[nn.Module], ...] | None = None
    sequence_parallel: bool = False


def plan_of(module: nn.Module, wishes: PlanWishes) -> ParallelPlan:
    """Return the plan of ``module``.

    Raises:
        LayersNotFound: a pipeline, or recomputation of layers, without a list of layers.
        StageModuleMisplaced: parameters that belong to no stage of a pipeline.
        ArgumentMeansNothing: layers that ask for something else than the configuration.
    """
    _check_unadapted(module, wishes)
    _check_sequence_parallel(module, wishes)
    styles, blocks = _tensor_styles(module)
    layers = find_layers(module, wishes.layer_class)
    if layers is None and (wishes.stages > 1 or wishes.recompute_layers):
        wanted = "A pipeline" if wishes.stages > 1 else "activation_checkpoint_config='full'"
        raise LayersNotFound(wanted=wanted, found=_what_was_found(module, wishes.layer_class))
    if wishes.sequence_parallel:  # other tables look up this rank's part of the sequence
        tables = [path for path, part in module.named_modules() if isinstance(part, nn.Embedding)]
        styles = {**dict.fromkeys(tables, _WHOLE), **styles}
    recompute = {}
    if wishes.recompute_class is not None:
        chosen = tuple(name for name, part in module.named_modules() if isinstance(part, wishes.recompute_class))
        recompute[RECOMPUTED] = chosen
    return ParallelPlan(
        tensor=styles,
        tensor_blocks=tuple(blocks),
        heads=_heads(module, styles, wishes.tensor_parallel),
        pipeline=None if wishes.stages == 1 or layers is None else _pipeline(module, layers, wishes.hidden_size),
        recompute=recompute,
        recompute_layer="layers.*" if layers is None else f"{layers}.*",
        tied=tuple(_tied(module)),
    )


def find_layers(module: nn.Module, layer_class: type[nn.Module] | None) -> str | None:
    """Return the path of the list of layers: that of ``layer_class``, or without one the longest; None without any."""
    lists = [
        (path, part)
        for path, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.ModuleDict) and len([*part.children()])
    ]
    if layer_class is not None:
        lists = [(path, part) for path, part in lists if all(isinstance(each, layer_class) for each in part.children())]
    else:
        lists = [(path, part) for path, part in lists if len({type(each) for each in part.children()}) == 1]
    outer = [(path, part) for path, part in lists if not any(path.startswith(f"{other}.") for other, _ in lists)]
    return max(outer, key=lambda found: len([*found[1].children()]))[0] if outer else None


def _what_was_found(module: nn.Module, layer_class: type[nn.Module] | None) -> str:
    if layer_class is not None:
        return f"{type(module).__name__} has no ModuleList of {layer_class.__name__}"
    return f"{type(module).__name__} has no ModuleList of modules of one class"


def _tensor_styles(module: nn.Module) -> tuple[dict[str, TensorStyle], list[str]]:
    """Styles by path, and the tensor blocks: each layer by itself, or the three projections of an attention."""
    styles: dict[str, TensorStyle] = {}
    blocks: list[str] = []
    fused = [path for path, part in module.named_modules() if isinstance(part, GQAQKVColumnParallelLinear)]
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, ColumnParallelLinear):
            styles[path] = "column_whole" if part.gather_output else "column"
        elif isinstance(part, RowParallelLinear):
            styles[path] = "row" if part.input_is_parallel else "row_split"
        elif isinstance(part, ParallelEmbedding):
            styles[path] = "vocab_embedding"
            continue
        else:
            continue
        if not any(path.startswith(f"{outer}.") for outer in fused):
            blocks.append(path)
    return styles, [*blocks, *fused]


def _heads(module: nn.Module, styles: dict[str, TensorStyle], tp: int) -> AttentionHeads | None:
    """The groups of ranks that hold copies of key and value features, as heads of one group a rank."""
    fused = [(path, part) for path, part in module.named_modules() if isinstance(part, GQAQKVColumnParallelLinear)]
    multipliers = {part.kv_size_multiplier for _, part in fused} - {1}
    if not multipliers or tp == 1:
        return None
    multiplier = multipliers.pop()
    if multipliers or any(part.kv_size_multiplier == 1 for _, part in fused):
        reason, advice = "differs between layers", "Give all attention layers the same."
        raise refused("GQAQKVColumnParallelLinear", "kv_size_multiplier", str(multiplier), reason, advice)
    if tp % multiplier:
        reason = f"does not divide tensor_parallel_size={tp}"
        advice = f"Choose a divisor of {tp}: as many ranks hold copies of the same key and value features."
        raise refused("GQAQKVColumnParallelLinear", "kv_size_multiplier", str(multiplier), reason, advice)
    return AttentionHeads(
        query_heads=tp,
        kv_heads=tp // multiplier,
        query=tuple(f"{path}.q" for path, _ in fused),
        key_value=tuple(f"{path}.{name}" for path, _ in fused for name in ("k", "v")),
        output=tuple(path for path, style in styles.items() if style == "row"),
    )


def _pipeline(module: nn.Module, layers: str, hidden_size: int | None) -> PipelinePlan:
    first, last = _around(module, layers)
    if hidden_size is None:
        config: Any = getattr(module, "config", None)
        known = [getattr(config, name) for name in _HIDDEN_SIZES if isinstance(getattr(config, name, None), int)]
        widths = [
            part.embedding_dim
            for name in first
            for part in module.get_submodule(name).modules()
            if isinstance(part, nn.Embedding)
        ]
        sizes = [*known, *widths]
        if not sizes:
            reason = "is needed: neither module.config nor an embedding says how wide hidden states are"
            advice = "Pass pipeline_config={'hidden_size': ...}, or set module.config.hidden_size."
            raise refused("neuronx_distributed_config", "pipeline_config['hidden_size']", "None", reason, advice)
        hidden_size = sizes[0]
    return PipelinePlan(hidden_size=hidden_size, first=first, layers=layers, last=last)


def _around(module: nn.Module, layers: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths of modules with parameters that were registered before the layers, and of those behind."""
    first: list[str] = []
    last: list[str] = []
    parts = layers.split(".")
    for depth, own in enumerate(parts):
        outer = ".".join(parts[:depth])
        parent = module.get_submodule(outer)
        direct = [*(name for name, _ in parent.named_parameters(recurse=False))]
        if direct:
            path = f"{outer}.{direct[0]}" if outer else direct[0]
            raise StageModuleMisplaced(path=path, reason="is a parameter of the module around the layers")
        behind = False
        for name, child in parent.named_children():
            if name == own:
                behind = True
            elif next(child.parameters(), None) is not None:
                (last if behind else first).append(f"{outer}.{name}" if outer else name)
    return tuple(first), tuple(last)


def _tied(module: nn.Module) -> Iterator[tuple[str, str]]:
    owners: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        if owner != name:
            yield owner, name


def _check_sequence_parallel(module: nn.Module, wishes: PlanWishes) -> None:
    if wishes.tensor_parallel == 1:
        return
    for path, part in module.named_modules():
        if wishes.sequence_parallel:
            wrong = next(
                (
                    each
                    for each in (("gather_output", True), ("input_is_parallel", False))
                    if isinstance(part, nn.Linear | GQAQKVColumnParallelLinear)
                    and getattr(part, each[0], None) is each[1]
                ),
                None,
            )
            reason = "gives or takes all features of whole sequences, and sequence parallelism is on"
            advice = "Pass gather_output=False to columns and input_is_parallel=True to rows."
        else:
            enabled = getattr(part, "sequence_parallel_enabled", False)
            wrong = ("sequence_parallel_enabled", True) if enabled else None
            reason = "is set, and sequence parallelism is off"
            advice = "Pass sequence_parallel=True to neuronx_distributed_config."
        if wrong is not None:
            raise refused(f"the layer '{path}'", wrong[0], str(wrong[1]), reason, advice)


def _check_unadapted(module: nn.Module, wishes: PlanWishes) -> None:
    """Layers that ``LoRAModel`` has changed no longer say how they are sharded."""
    if max(wishes.tensor_parallel, wishes.stages) == 1:
        return
    for path, part in module.named_modules():
        if isinstance(part, UpdatedLinear | UpdatedEmbedding):
            advice = "Return the module itself from model_fn, and pass lora_config to neuronx_distributed_config."
            raise refused("LoRAModel", "module", repr(path), "has updates before it is sharded", advice)
