"""Errors of layouts: pipeline stages, context and expert parallelism, compilation: codes ``NXDT-P03…`` to ``P09…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing, one_of

__all__ = [
    "LAYOUT_KEYS",
    "AttentionCoreMissing",
    "AttentionCoreUnknown",
    "ContextSequenceDoesNotDivide",
    "ExpertsDoNotDivide",
    "FewerLayersThanStages",
    "LayerNotWhole",
    "LayersDoNotDivide",
    "LayoutRefused",
    "MicroBatchesDoNotFit",
    "ModelWithoutExperts",
    "PipelineCutsDoNotFit",
    "PipelinePlanMissing",
    "RingNeedsPointToPoint",
    "ShapesDependOnData",
    "ShardNotComputed",
    "TiedParametersCutApart",
    "TooManyGraphs",
    "UnknownPipelineCut",
    "ZeroBubbleCannot",
]


LAYOUT_KEYS = {
    "tp": "distributed_strategy.tensor_model_parallel_size",
    "pp": "distributed_strategy.pipeline_model_parallel_size",
    "cp": "distributed_strategy.context_parallel_size",
    "ep": "distributed_strategy.expert_model_parallel_size",
}
"""Mesh dimension along which a plan shards a model → key of the configuration."""


class LayoutRefused(NxdtError):
    """A model's plan says that, and why, it cannot be laid out along a mesh dimension."""

    code = "NXDT-P070"
    happened = "{model} cannot be laid out with {key}={size}: {reason}."
    remedy = "Set {key}=1."
    model: str
    dimension: str
    size: int
    reason: str

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "key": LAYOUT_KEYS[self.dimension]}


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


class LayerNotWhole(NxdtError):
    """A layer with code that cannot be traced; logged as a warning."""

    code = "NXDT-P090"
    happened = (
        "model.compile: the layer '{path}' ({layer}) is not one graph, and layers of this class are compiled in "
        "pieces, with less gain. torch says: {reason}."
    )
    remedy = "Change the code that it names, or set model.compile to false."
    path: str
    layer: str
    reason: str


class TooManyGraphs(NxdtError):
    """A layer that was compiled too often; logged as a warning."""

    code = "NXDT-P091"
    happened = (
        "model.compile: the layer '{path}' ({layer}) asked for another graph at every change, and layers of this "
        "class run without compilation from now on. torch says: {reason}."
    )
    remedy = "Run with TORCH_LOGS=recompiles to see what changes, or set model.compile to false."
    path: str
    layer: str
    reason: str


class ContextSequenceDoesNotDivide(NxdtError):
    """A sequence that does not fall into two equal chunks for each context parallel rank."""

    code = "NXDT-P060"
    happened = (
        "A sequence of {length} tokens does not fall into {chunks} equal chunks, two for each of {ranks} context "
        "parallel ranks."
    )
    remedy = (
        "Make data.seq_length a multiple of {chunks} ({next_length}, say), or change "
        "distributed_strategy.context_parallel_size."
    )
    length: int
    ranks: int

    def _view(self) -> dict[str, Any]:
        chunks = 2 * self.ranks
        next_length = max(1, -(-self.length // chunks)) * chunks
        return {**super()._view(), "chunks": chunks, "next_length": next_length}


class AttentionCoreMissing(NxdtError):
    """A model whose attention context parallelism cannot find."""

    code = "NXDT-P061"
    happened = "distributed_strategy.context_parallel_size is {ranks}, and the model's plan names {found}."
    remedy = (
        "Name the model's attention cores in ParallelPlan.attention_cores, or train it with "
        "distributed_strategy.context_parallel_size=1."
    )
    patterns: tuple[str, ...]
    ranks: int

    def _view(self) -> dict[str, Any]:
        found = f"attention cores that it does not have: {listing(self.patterns)}" if self.patterns else "no attention"
        return {**super()._view(), "found": found}


class AttentionCoreUnknown(NxdtError):
    """An attention core whose mask context parallelism cannot shard."""

    code = "NXDT-P062"
    happened = "The attention core '{path}' ({core}) cannot be computed in parts: {reason}."
    remedy = (
        "Context parallelism computes softmax(scale q kᵀ) v over earlier tokens of the same document: let a core that "
        "does just that say so in semantics(), as nxdt_core.nn.attention.CausalAttention does; train others with "
        "distributed_strategy.context_parallel_size=1."
    )
    path: str
    core: str
    reason: str


class RingNeedsPointToPoint(NxdtError):
    """Ring attention on devices that cannot send to each other."""

    code = "NXDT-P063"
    happened = (
        "distributed_strategy.context_parallel_method is ring, and devices of type '{device_type}' cannot send to each "
        "other without the rest of their group."
    )
    remedy = "Write distributed_strategy.context_parallel_method: gather, or leave the key out."
    device_type: str


class ModelWithoutExperts(NxdtError):
    """Expert parallelism of a model that has nothing to share out."""

    code = "NXDT-P050"
    happened = "distributed_strategy.expert_model_parallel_size is {ep}, and the model's plan names no experts."
    remedy = "Set it to 1, or train a model with experts."
    ep: int


class ExpertsDoNotDivide(NxdtError):
    """Experts that do not fall into equal parts."""

    code = "NXDT-P051"
    happened = "'{module}' has {experts} experts, which {ep} expert parallel ranks cannot share in equal parts."
    remedy = "Set distributed_strategy.expert_model_parallel_size to a size that divides {experts}."
    module: str
    experts: int
    ep: int


class PipelinePlanMissing(NxdtError):
    """A model that does not say where it may be cut."""

    code = "NXDT-P030"
    happened = "The model's plan does not say where it may be cut, and {stages} pipeline stages are asked for."
    remedy = "Set distributed_strategy.pipeline_model_parallel_size=1, or give the model's plan a PipelinePlan."
    stages: int


class LayersDoNotDivide(NxdtError):
    """An even cut that leaves a remainder."""

    code = "NXDT-P031"
    happened = "{layers} layers do not divide into {stages} pipeline stages."
    remedy = (
        "Choose PP x VPP that divides {layers}, or name the {cuts} modules that end a stage in model.pipeline_cuts."
    )
    layers: int
    stages: int

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "cuts": self.stages - 1}


class UnknownPipelineCut(NxdtError):
    """A cut at a module that does not exist or ends no layer."""

    code = "NXDT-P032"
    happened = "model.pipeline_cuts names '{cut}', which is not a layer of the model."
    remedy = "{meant}Layers are '{first}' to '{last}'; each name is the last layer of a stage."
    cut: str
    close: tuple[str, ...]
    first: str
    last: str

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "meant": f"Did you mean {one_of(self.close)}? " if self.close else ""}


class PipelineCutsDoNotFit(NxdtError):
    """Cuts that are too many, too few, repeated or out of order."""

    code = "NXDT-P033"
    happened = "model.pipeline_cuts {given} cannot make {stages} pipeline stages."
    remedy = "Name {cuts} layers in ascending order, the last one of each stage but the final stage's."
    cuts_given: tuple[str, ...]
    stages: int

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "given": list(self.cuts_given), "cuts": self.stages - 1}


class MicroBatchesDoNotFit(NxdtError):
    """A pipeline schedule that the micro-batches of a step cannot fill."""

    code = "NXDT-P034"
    happened = (
        "The pipeline schedule {schedule} with PP {pp} wants {rule} micro-batches per step, and there are "
        "{micro_batches} (data.global_batch_size / (data.micro_batch_size x data parallel size))."
    )
    remedy = "Raise data.global_batch_size or lower data.micro_batch_size, e.g. to {example} micro-batches."
    schedule: str
    pp: int
    micro_batches: int
    rule: str
    example: int


class TiedParametersCutApart(NxdtError):
    """Tied parameters on stages between which gradients are not exchanged."""

    code = "NXDT-P035"
    happened = (
        "The tied parameters '{owner}' and '{user}' would be on the pipeline stages {owner_stage} and {user_stage}."
    )
    remedy = "Choose model.pipeline_cuts that keep their layers together; only the first and the last stage share any."
    owner: str
    user: str
    owner_stage: int
    user_stage: int


class ZeroBubbleCannot(NxdtError):
    """What needs a whole backward pass, under a schedule that splits it."""

    code = "NXDT-P036"
    happened = "The pipeline schedule zbv splits backward into two passes, which does not go with {feature}."
    remedy = "Set distributed_strategy.pipeline_schedule=1f1b or interleaved, or {without}."
    feature: str
    without: str


class ShapesDependOnData(NxdtError):
    """A layer whose shapes follow from values, on a device that compiles for fixed shapes."""

    code = "NXDT-P037"
    happened = (
        "The router '{path}' drops nothing, so that each of its {experts} experts gets another number of tokens in "
        "every step, and devices of this type compile a graph for each shape."
    )
    remedy = (
        "Give experts a fixed capacity by the model's capacity factor (model.moe.capacity_factor of mixtral): "
        "{whole:g} has room for every token, 1.25 costs less and drops the assignments that exceed it."
    )
    path: str
    experts: int
    top_k: int

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "whole": self.experts / self.top_k}


class ExchangeInOnePart(NxdtError):
    """Chunks of tokens, on a device that cannot send one while it computes another."""

    code = "NXDT-P038"
    happened = (
        "The experts '{path}' are to send their tokens in {chunks} chunks, one while another is computed, and devices "
        "of the type '{device_type}' have no all-to-all: their exchange is made of gathers, which are waited for."
    )
    remedy = "Set model.moe.exchange_chunks=1."
    path: str
    chunks: int
    device_type: str


class NoSymmetricMemory(NxdtError):
    """Asynchronous tensor parallelism, on a device whose processes cannot read one another's memory."""

    code = "NXDT-P039"
    happened = (
        "distributed_strategy.async_tensor_parallel needs symmetric memory, and the profile of devices of the type "
        "'{device_type}' does not declare any."
    )
    remedy = "Set distributed_strategy.async_tensor_parallel=false."
    device_type: str


class FewerLayersThanStages(NxdtError):
    """A pipeline that is longer than its model."""

    code = "NXDT-P132"
    happened = "{layers} layers cannot fill {stages} pipeline stages."
    remedy = "Choose PP x VPP of at most {layers}."
    layers: int
    stages: int
