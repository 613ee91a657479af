"""Rules of the layout: the world, the batch, and what tensor, context and expert parallelism cut into equal parts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nxdt_core.config.validate.checked import Checked
from nxdt_core.config.validate.shuffle import shuffle_fits
from nxdt_core.config.validate.sizes import BATCH, CP, EP, MICRO_BATCH, PP, REPLICAS, TP, WORLD, mesh_sizes
from nxdt_core.errors.configuration import ImpossibleCombination

__all__ = ["LAYOUT_RULES"]

_VOCAB_MULTIPLE = "model.make_vocab_size_divisible_by"
_HEADS, _KV_HEADS = "model.num_attention_heads", "model.num_kv_heads"
_KV_REPLICATOR, _PAD_HEADS = "distributed_strategy.kv_replicator", "distributed_strategy.pad_heads"
_EXPERTS = "model.moe.num_experts"
_FOREIGN = "model.hf_config"
"""Where a model is described in another library's words; whether it has experts is seen when it is built."""


def world_divides(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Processes must fill whole copies of the model."""
    numbers = checked.numbers(*WORLD, TP, PP, CP)
    if numbers is None:
        return
    devices, nodes, tp, pp, cp = numbers
    if devices * nodes % (tp * pp * cp):
        yield ImpossibleCombination(
            **checked.place(*WORLD, TP, PP, CP),
            reason=f"{nodes} x {devices} processes do not divide into groups of TP {tp} x PP {pp} x CP {cp}",
            advice=f"Make trainer.devices x trainer.num_nodes a multiple of {tp * pp * cp}.",
        )


def replicas_divide(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Data parallel ranks fall into equal groups, and expert parallel ranks fill such a group."""
    numbers = checked.numbers(*WORLD, TP, PP, CP, REPLICAS, EP)
    if numbers is None:
        return
    devices, nodes, tp, pp, cp, replicas, ep = numbers
    dp, rest = divmod(devices * nodes, tp * pp * cp)
    if rest:
        return
    if dp % replicas:
        yield ImpossibleCombination(
            **checked.place(REPLICAS, *WORLD),
            reason=f"{dp} data parallel ranks do not divide into {replicas} groups",
            advice=f"Choose a divisor of {dp}.",
        )
    elif dp // replicas * cp % ep:
        shards = dp // replicas * cp
        yield ImpossibleCombination(
            **checked.place(EP, REPLICAS, CP, *WORLD),
            reason=f"expert parallelism borrows from {shards} data and context parallel ranks, which EP {ep} does not"
            " divide",
            advice=f"Choose a divisor of {shards}.",
        )


def batch_divides(checked: Checked) -> Iterator[ImpossibleCombination]:
    """A global batch is a whole number of micro-batches on each data parallel rank."""
    numbers, sizes = checked.numbers(BATCH, MICRO_BATCH), mesh_sizes(checked)
    if numbers is None or sizes is None:
        return
    whole, micro = numbers
    if whole % (micro * sizes.dp):
        yield ImpossibleCombination(
            **checked.place(BATCH, MICRO_BATCH),
            reason=f"{whole} does not divide by data.micro_batch_size {micro} x {sizes.dp} data parallel ranks",
            advice=f"Write a multiple of {micro * sizes.dp}.",
        )


def heads_divide(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Each tensor parallel device takes whole query heads; ``pad_heads`` adds what is missing."""
    numbers = checked.numbers(_HEADS, TP)
    if numbers is None or checked.values.get(_PAD_HEADS):
        return
    heads, tp = numbers
    if heads % tp:
        yield ImpossibleCombination(
            **checked.place(_HEADS, TP),
            reason=f"{heads} does not divide by tensor_model_parallel_size {tp}",
            advice=f"Choose a tensor parallel size that divides {heads}, or set {_PAD_HEADS} to true.",
        )


def kv_heads_divide(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Key and value heads are shared out, or each is copied to equally many devices; ``pad_heads`` adds heads."""
    numbers = checked.numbers(_KV_HEADS, TP, _KV_REPLICATOR)
    if numbers is None or checked.values.get(_PAD_HEADS):
        return
    heads, tp, copies = numbers
    if heads % tp and tp % heads:
        yield ImpossibleCombination(
            **checked.place(_KV_HEADS, TP),
            reason=f"{heads} key and value heads can neither be shared out nor copied evenly over"
            f" tensor_model_parallel_size {tp}",
            advice=f"Choose a tensor parallel size that divides {heads} or is a multiple of it.",
        )
    elif copies > 1 and heads * copies % tp:
        yield ImpossibleCombination(
            **checked.place(_KV_REPLICATOR, TP),
            reason=f"{heads} heads x kv_replicator {copies} does not divide by tensor_model_parallel_size {tp}",
            advice=f"Leave it out, or write {max(1, tp // heads)}.",
        )


def columns_divide(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Each tensor parallel device takes equal parts of the feed-forward block and of the vocabulary."""
    # Where the vocabulary is filled up, what it is filled up to is divided.
    filled = checked.numbers(_VOCAB_MULTIPLE) is not None
    for key in ("model.ffn_hidden_size", _VOCAB_MULTIPLE if filled else "model.vocab_size"):
        numbers = checked.numbers(key, TP)
        if numbers is not None and numbers[0] % numbers[1]:
            yield ImpossibleCombination(
                **checked.place(key, TP),
                reason=f"{numbers[0]} does not divide by tensor_model_parallel_size {numbers[1]}",
                advice=f"Choose a tensor parallel size that divides {numbers[0]}, or write a multiple of {numbers[1]}.",
            )


def experts_divide(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Each expert parallel device takes whole experts, of a model that has some."""
    sizes, experts = checked.numbers(EP), checked.numbers(_EXPERTS)
    if sizes is None or sizes[0] == 1 or checked.values.get(_FOREIGN):
        return
    if experts is None:
        yield ImpossibleCombination(
            **checked.place(EP),
            reason=f"EP {sizes[0]} shares out experts, and the model has none ({_EXPERTS} is not set)",
            advice="Set it to 1, or choose a model with experts.",
        )
    elif experts[0] % sizes[0]:
        yield ImpossibleCombination(
            **checked.place(_EXPERTS, EP),
            reason=f"{experts[0]} experts do not divide by expert_model_parallel_size {sizes[0]}",
            advice="Choose an expert parallel size that divides the experts.",
        )


def sequence_divides(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Context parallelism gives each device two parts of a sequence, sequence parallelism cuts what a device has."""
    numbers = checked.numbers("data.seq_length", CP, TP)
    if numbers is None:
        return
    length, cp, tp = numbers
    sharded = tp if checked.values.get("distributed_strategy.sequence_parallel") else 1
    parts = cp * math.lcm(2, sharded) if cp > 1 else sharded
    if length % parts:
        yield ImpossibleCombination(
            **checked.place("data.seq_length", CP, TP),
            reason=f"{length} tokens do not divide into {parts} equal parts (CP {cp}, TP {tp}"
            f"{' with sequence_parallel' if sharded > 1 else ''})",
            advice=f"Write a multiple of {parts}.",
        )


LAYOUT_RULES = (
    world_divides,
    replicas_divide,
    batch_divides,
    heads_divide,
    kv_heads_divide,
    columns_divide,
    experts_divide,
    sequence_divides,
    shuffle_fits,
)
"""In the order in which they are tried."""
