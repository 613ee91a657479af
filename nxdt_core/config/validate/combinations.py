"""Numbers that must divide and settings that exclude each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from nxdt_core.config.validate.checked import Checked
from nxdt_core.errors import ImpossibleCombination

__all__ = ["RULES", "find_impossible"]

Rule = Callable[[Checked], Iterable[ImpossibleCombination]]

_TP = "distributed_strategy.tensor_model_parallel_size"
_PP = "distributed_strategy.pipeline_model_parallel_size"
_VPP = "distributed_strategy.virtual_pipeline_model_parallel_size"
_CP = "distributed_strategy.context_parallel_size"
_DEVICES = ("trainer.devices", "trainer.num_nodes")


def find_impossible(checked: Checked) -> Iterator[ImpossibleCombination]:
    """What every rule finds."""
    for rule in RULES:
        yield from rule(checked)


def data_parallel_size(checked: Checked) -> int | None:
    """Ranks that read different samples; None where the world does not divide or a size is wrong."""
    sizes = checked.numbers(*_DEVICES, _TP, _PP, _CP)
    if sizes is None:
        return None
    devices, nodes, tp, pp, cp = sizes
    return None if devices * nodes % (tp * pp * cp) else devices * nodes // (tp * pp * cp)


def world_divides(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Processes must fill whole copies of the model."""
    sizes = checked.numbers(*_DEVICES, _TP, _PP, _CP)
    if sizes is not None and data_parallel_size(checked) is None:
        devices, nodes, tp, pp, cp = sizes
        yield ImpossibleCombination(
            **checked.place("trainer.devices", "trainer.num_nodes", _TP, _PP, _CP),
            reason=f"{nodes} x {devices} processes do not divide into groups of TP {tp} x PP {pp} x CP {cp}",
            advice=f"Make trainer.devices x trainer.num_nodes a multiple of {tp * pp * cp}.",
        )


def batch_divides(checked: Checked) -> Iterator[ImpossibleCombination]:
    """A global batch is a whole number of micro-batches on each data parallel rank."""
    sizes = checked.numbers("data.global_batch_size", "data.micro_batch_size")
    dp = data_parallel_size(checked)
    if sizes is None or dp is None:
        return
    whole, micro = sizes
    if whole % (micro * dp):
        yield ImpossibleCombination(
            **checked.place("data.global_batch_size", "data.micro_batch_size"),
            reason=f"{whole} does not divide by data.micro_batch_size {micro} x {dp} data parallel ranks",
            advice=f"Write a multiple of {micro * dp}.",
        )


def heads_divide(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Each tensor parallel device takes whole heads."""
    for key in ("model.num_attention_heads", "model.num_kv_heads"):
        sizes = checked.numbers(key, _TP, "distributed_strategy.kv_replicator")
        if sizes is None:
            continue
        heads, tp, replicas = sizes
        copies = replicas if key.endswith("kv_heads") else 1
        if heads * copies % tp:
            written = f"{heads} x kv_replicator {copies}" if copies > 1 else f"{heads}"
            yield ImpossibleCombination(
                **checked.place(key, _TP),
                reason=f"{written} does not divide by tensor_model_parallel_size {tp}",
                advice=f"Choose a tensor parallel size that divides {heads * copies}.",
            )


def layers_divide(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Stages of the pipeline take equally many layers, unless ``model.pipeline_cuts`` says where to cut."""
    sizes = checked.numbers("model.num_layers", _PP)
    if sizes is None or checked.values.get("model.pipeline_cuts"):
        return
    layers, pp = sizes
    stages = pp * (checked.values.get(_VPP) or 1)
    if layers % stages:
        yield ImpossibleCombination(
            **checked.place("model.num_layers", _PP, _VPP),
            reason=f"{layers} layers do not divide by PP x VPP = {stages} stages",
            advice="Choose sizes that divide the layers, or name the cuts in model.pipeline_cuts.",
        )


def cuts_match_stages(checked: Checked) -> Iterator[ImpossibleCombination]:
    """``model.pipeline_cuts`` has one name fewer than there are stages."""
    cuts, sizes = checked.values.get("model.pipeline_cuts"), checked.numbers(_PP)
    if not cuts or sizes is None:
        return
    stages = sizes[0] * (checked.values.get(_VPP) or 1)
    if len(cuts) != stages - 1:
        yield ImpossibleCombination(
            **checked.place("model.pipeline_cuts"),
            reason=f"{len(cuts)} cuts make {len(cuts) + 1} stages, but PP x VPP = {stages}",
            advice=f"Name {stages - 1} cuts.",
        )


def experts_divide(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Each expert parallel device takes whole experts."""
    ep_key = "distributed_strategy.expert_model_parallel_size"
    sizes = checked.numbers("model.moe.num_experts", ep_key)
    if sizes is not None and sizes[0] % sizes[1]:
        yield ImpossibleCombination(
            **checked.place("model.moe.num_experts", ep_key),
            reason=f"{sizes[0]} experts do not divide by expert_model_parallel_size {sizes[1]}",
            advice="Choose an expert parallel size that divides the experts.",
        )


def sequence_divides(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Context and sequence parallelism cut a sequence into equal parts; load balancing takes two a device."""
    sizes = checked.numbers("data.seq_length", _CP, _TP)
    if sizes is None:
        return
    length, cp, tp = sizes
    parts = (2 * cp if cp > 1 else 1) * (tp if checked.values.get("distributed_strategy.sequence_parallel") else 1)
    if length % parts:
        yield ImpossibleCombination(
            **checked.place("data.seq_length", _CP, _TP),
            reason=f"{length} tokens do not divide into {parts} equal parts (CP {cp}, TP {tp} with sequence_parallel)",
            advice=f"Write a multiple of {parts}.",
        )


def zero_stage_agrees(checked: Checked) -> Iterator[ImpossibleCombination]:
    """``zero1: false`` switches sharding off, ``zero_stage`` switches it on."""
    stage = checked.values.get("distributed_strategy.zero_stage")
    if stage is not None and checked.values.get("distributed_strategy.zero1") is False:
        yield ImpossibleCombination(
            **checked.place("distributed_strategy.zero_stage", "distributed_strategy.zero1"),
            reason=f"zero_stage {stage} shards, and zero1: false says not to",
            advice="Leave zero1 out, or set zero_stage to null.",
        )


def schedule_fits(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Virtual stages need a schedule that knows them."""
    schedule, vpp = checked.values.get("distributed_strategy.pipeline_schedule"), checked.values.get(_VPP) or 1
    if schedule == "1f1b" and vpp > 1:
        yield ImpossibleCombination(
            **checked.place("distributed_strategy.pipeline_schedule", _VPP),
            reason=f"the schedule 1f1b has one stage a device, and virtual_pipeline_model_parallel_size is {vpp}",
            advice="Choose interleaved or zbv, or set the virtual size to 1.",
        )


def resume_named(checked: Checked) -> Iterator[ImpossibleCombination]:
    """``weight_init_only`` takes weights from somewhere."""
    if checked.values.get("checkpoint.weight_init_only") and checked.values.get("checkpoint.resume_from", "") is None:
        yield ImpossibleCombination(
            **checked.place("checkpoint.weight_init_only", "model.weight_init_only"),
            reason="weight_init_only takes the weights of a checkpoint, and checkpoint.resume_from names none",
            advice="Set checkpoint.resume_from.",
        )


def one_objective(checked: Checked) -> Iterator[ImpossibleCombination]:
    """A run has one loss."""
    keys = ("model_alignment_strategy.dpo", "model_alignment_strategy.orpo")
    if all(checked.tree.plain(key) is not None for key in keys):
        yield ImpossibleCombination(
            **checked.place(keys[1]),
            reason=f"{keys[0]} is given too, and a run has one loss",
            advice="Keep one of them.",
        )


def recompute_named(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Modules to recompute are read under ``selective`` alone."""
    key = "model.activations_checkpoint_recompute"
    granularity = checked.values.get("model.activations_checkpoint_granularity")
    if checked.values.get(key) and granularity == "full":
        yield ImpossibleCombination(
            **checked.place(key),
            reason="whole layers are recomputed under granularity 'full', so naming modules means nothing",
            advice="Set model.activations_checkpoint_granularity to selective, or leave the names out.",
        )


def rate_falls(checked: Checked) -> Iterator[ImpossibleCombination]:
    """A schedule ends at ``min_lr``, below the rate that it starts from."""
    floor, rate = "model.optim.sched.min_lr", "model.optim.lr"
    rates = checked.numbers(floor, rate)
    if rates is not None and rates[0] > rates[1]:
        yield ImpossibleCombination(
            **checked.place(floor, rate),
            reason=f"min_lr {rates[0]} is above the learning rate {rates[1]} ({rate}) that falls to it",
            advice=f"Lower {floor} or raise {rate}.",
        )


def sequence_has_positions(checked: Checked) -> Iterator[ImpossibleCombination]:
    """A model with a declared number of positions takes no longer sequence."""
    length, longest = "data.seq_length", "model.max_position_embeddings"
    sizes = checked.numbers(length, longest)
    if sizes is not None and sizes[0] > sizes[1]:
        yield ImpossibleCombination(
            **checked.place(length, longest),
            reason=f"sequences have {sizes[0]} tokens, the model has positions for {sizes[1]} ({longest})",
            advice=f"Shorten {length} or raise {longest}.",
        )


RULES: tuple[Rule, ...] = (
    world_divides,
    batch_divides,
    heads_divide,
    layers_divide,
    cuts_match_stages,
    experts_divide,
    sequence_divides,
    zero_stage_agrees,
    schedule_fits,
    resume_named,
    one_objective,
    recompute_named,
    rate_falls,
    sequence_has_positions,
)
"""In the order in which they are tried."""
