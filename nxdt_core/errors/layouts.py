"""Errors of layouts: pipeline stages, context and expert parallelism, compilation: codes ``NXDT-P03…`` to ``P09…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing, one_of

LAYOUT_KEYS = {
    "tp": "distributed_strategy.tensor_model_parallel_size",
    "pp": "distributed_strategy.pipeline_model_parallel_size",
    "cp": "distributed_strategy.context_parallel_size",
    "ep": "distributed_strategy.expert_model_parallel_size",
}
"""Mesh dimension along which a plan shards a model → key of the configuration."""

LayoutRefused = NxdtError.define(
    "NXDT-P070",
    "A model's plan says that, and why, it cannot be laid out along a mesh dimension.",
    "{model} cannot be laid out with {key}={size}: {reason}.",
    "Set {key}=1.",
    also=lambda error: {"key": LAYOUT_KEYS[error.dimension]},
)


class ShardNotComputed(NxdtError):
    """A model's plan can be applied, and the model cannot compute with the shards that it makes."""

    code = "NXDT-P071"
    happened = "{model}{by} cannot be computed with {layout}: {place} fails on its shard ({reason}). {held}{named}"
    remedy = "Set {alone}, or correct the plan of the model's plugin."
    model: str
    sizes: dict[str, int]
    """Mesh dimension (``tp``, ``pp``, ``ep``, ``cp``) → number of ranks, of those above 1."""
    module: str
    """Path of the innermost module that fails; empty where that is not known."""
    parameters: list[str]
    """Names and shapes of what that module holds on a rank."""
    entry: str
    """The plan's entry for it; empty where there is none."""
    reason: str
    plugin: str = ""
    """The model's name and who brought it; empty where that is not known."""

    def _view(self) -> dict[str, Any]:
        return {
            **super()._view(),
            "layout": " and ".join(f"{LAYOUT_KEYS[name]}={size}" for name, size in self.sizes.items()),
            "alone": " and ".join(f"{LAYOUT_KEYS[name]}=1" for name in self.sizes),
            "by": f", the model {self.plugin}," if self.plugin else "",
            "place": f"'{self.module}'" if self.module else "it",
            "held": f"A rank holds {', '.join(self.parameters)}. " if self.parameters else "",
            "named": f"The plan's entry is {self.entry}." if self.entry else "No entry of the plan names it.",
        }


BaseNotQuantised = NxdtError.define(
    "NXDT-P072",
    "Frozen weights that ``adapter.base_dtype`` cannot have in this layout or dtype.",
    "adapter.base_dtype is {dtype}, and {reason}.",
    "Leave adapter.base_dtype out. {instead}.",
)

LayerNotWhole = NxdtError.define(
    "NXDT-P090",
    "A layer with code that cannot be traced; logged as a warning.",
    "model.compile: the layer '{path}' ({layer}) is not one graph, and layers of this class are compiled in "
    "pieces, with less gain. torch says: {reason}.",
    "Change the code that it names, or set model.compile to false.",
)

TooManyGraphs = NxdtError.define(
    "NXDT-P091",
    "A layer that was compiled too often; logged as a warning.",
    "model.compile: the layer '{path}' ({layer}) asked for another graph at every change, and layers of this "
    "class run without compilation from now on. torch says: {reason}.",
    "Run with TORCH_LOGS=recompiles to see what changes, or set model.compile to false.",
)

ContextSequenceDoesNotDivide = NxdtError.define(
    "NXDT-P060",
    "A sequence that does not fall into two equal chunks for each context parallel rank.",
    "A sequence of {length} tokens does not fall into {chunks} equal chunks, two for each of {ranks} context "
    "parallel ranks.",
    "Make data.seq_length a multiple of {chunks} ({next_length}, say), or change "
    "distributed_strategy.context_parallel_size.",
    also=lambda error: {
        "chunks": 2 * error.ranks,
        "next_length": max(1, -(-error.length // (2 * error.ranks))) * 2 * error.ranks,
    },
)

AttentionCoreMissing = NxdtError.define(
    "NXDT-P061",
    "A model whose attention context parallelism cannot find.",
    "distributed_strategy.context_parallel_size is {ranks}, and the model's plan names {found}.",
    "Name the model's attention cores in ParallelPlan.attention_cores, or train it with "
    "distributed_strategy.context_parallel_size=1.",
    also=lambda error: {
        "found": f"attention cores that it does not have: {listing(error.patterns)}"
        if error.patterns
        else "no attention"
    },
)

AttentionCoreUnknown = NxdtError.define(
    "NXDT-P062",
    "An attention core whose mask context parallelism cannot shard.",
    "The attention core '{path}' ({core}) cannot be computed in parts: {reason}.",
    "Context parallelism computes softmax(scale q kᵀ) v over earlier tokens of the same document: let a core that "
    "does just that say so in semantics(), as nxdt_core.models.attention.CausalAttention does; train others with "
    "distributed_strategy.context_parallel_size=1.",
)

RingNeedsPointToPoint = NxdtError.define(
    "NXDT-P063",
    "Ring attention on devices that cannot send to each other.",
    "distributed_strategy.context_parallel_method is ring, and devices of type '{device_type}' cannot send to each "
    "other without the rest of their group.",
    "Write distributed_strategy.context_parallel_method: gather, or leave the key out.",
)

ModelWithoutExperts = NxdtError.define(
    "NXDT-P050",
    "Expert parallelism of a model that has nothing to share out.",
    "distributed_strategy.expert_model_parallel_size is {ep}, and the model's plan names no experts.",
    "Set it to 1, or train a model with experts.",
)

ExpertsDoNotDivide = NxdtError.define(
    "NXDT-P051",
    "Experts that do not fall into equal parts.",
    "'{module}' has {experts} experts, which {ep} expert parallel ranks cannot share in equal parts.",
    "Set distributed_strategy.expert_model_parallel_size to a size that divides {experts}.",
)

PipelinePlanMissing = NxdtError.define(
    "NXDT-P030",
    "A model that does not say where it may be cut.",
    "The model's plan does not say where it may be cut, and {stages} pipeline stages are asked for.",
    "Set distributed_strategy.pipeline_model_parallel_size=1, or give the model's plan a PipelinePlan.",
)

LayersDoNotDivide = NxdtError.define(
    "NXDT-P031",
    "An even cut that leaves a remainder.",
    "{layers} layers do not divide into {stages} pipeline stages.",
    "Choose PP x VPP that divides {layers}, or name the {cuts} modules that end a stage in model.pipeline_cuts.",
    also=lambda error: {"cuts": error.stages - 1},
)

UnknownPipelineCut = NxdtError.define(
    "NXDT-P032",
    "A cut at a module that does not exist or ends no layer.",
    "model.pipeline_cuts names '{cut}', which is not a layer of the model.",
    "{meant}Layers are '{first}' to '{last}'; each name is the last layer of a stage.",
    also=lambda error: {"meant": f"Did you mean {one_of(error.close)}? " if error.close else ""},
)

PipelineCutsDoNotFit = NxdtError.define(
    "NXDT-P033",
    "Cuts that are too many, too few, repeated or out of order.",
    "model.pipeline_cuts {given} cannot make {stages} pipeline stages.",
    "Name {cuts} layers in ascending order, the last one of each stage but the final stage's.",
    also=lambda error: {"given": list(error.cuts_given), "cuts": error.stages - 1},
)

MicroBatchesDoNotFit = NxdtError.define(
    "NXDT-P034",
    "A pipeline schedule that the micro-batches of a step cannot fill.",
    "The pipeline schedule {schedule} with PP {pp} wants {rule} micro-batches per step, and there are "
    "{micro_batches} (data.global_batch_size / (data.micro_batch_size x data parallel size)).",
    "Raise data.global_batch_size or lower data.micro_batch_size, e.g. to {example} micro-batches.",
)

TiedParametersCutApart = NxdtError.define(
    "NXDT-P035",
    "Tied parameters on stages between which gradients are not exchanged.",
    "The tied parameters '{owner}' and '{user}' would be on the pipeline stages {owner_stage} and {user_stage}.",
    "Choose model.pipeline_cuts that keep their layers together; only the first and the last stage share any.",
)

ZeroBubbleCannot = NxdtError.define(
    "NXDT-P036",
    "What needs a whole backward pass, under a schedule that splits it.",
    "The pipeline schedule zbv splits backward into two passes, which does not go with {feature}.",
    "Set distributed_strategy.pipeline_schedule=1f1b or interleaved, or {without}.",
)

ShapesDependOnData = NxdtError.define(
    "NXDT-P037",
    "A layer whose shapes follow from values, on a device that compiles for fixed shapes.",
    "The router '{path}' drops nothing, so that each of its {experts} experts gets another number of tokens in "
    "every step, and devices of this type compile a graph for each shape.",
    "Give experts a fixed capacity by the model's capacity factor (model.moe.capacity_factor of mixtral): "
    "{whole:g} has room for every token, 1.25 costs less and drops the assignments that exceed it.",
    also=lambda error: {"whole": error.experts / error.top_k},
)

ExchangeInOnePart = NxdtError.define(
    "NXDT-P038",
    "Chunks of tokens, on a device that cannot send one while it computes another.",
    "The experts '{path}' are to send their tokens in {chunks} chunks, one while another is computed, and devices "
    "of the type '{device_type}' have no all-to-all: their exchange is made of gathers, which are waited for.",
    "Set model.moe.exchange_chunks=1.",
)

NoSymmetricMemory = NxdtError.define(
    "NXDT-P039",
    "Asynchronous tensor parallelism, on a device whose processes cannot read one another's memory.",
    "distributed_strategy.async_tensor_parallel needs symmetric memory, and the profile of devices of the type "
    "'{device_type}' does not declare any.",
    "Set distributed_strategy.async_tensor_parallel=false.",
)

FewerLayersThanStages = NxdtError.define(
    "NXDT-P132",
    "A pipeline that is longer than its model.",
    "{layers} layers cannot fill {stages} pipeline stages.",
    "Choose PP x VPP of at most {layers}.",
)
