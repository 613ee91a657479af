"""Rules of what tensor, context and expert parallelism divide into equal parts, and the list of all rules."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nxdt_core.config.validate.sizes import CP, EP, TP
from nxdt_core.engine.rules.async_tensor import async_tensor_parallel_fits
from nxdt_core.engine.rules.shuffle import shuffle_fits
from nxdt_core.engine.rules.stages import STAGE_RULES
from nxdt_core.engine.rules.torch_version import TORCH_RULES
from nxdt_core.errors.configuration import ConfigProblem, ImpossibleCombination, Misfit
from nxdt_core.protocols.parallel.rules import Settings

__all__ = ["RULES", "find_impossible_layouts"]

_VOCAB_MULTIPLE = "model.make_vocab_size_divisible_by"
_HEADS, _KV_HEADS = "model.num_attention_heads", "model.num_kv_heads"
_KV_REPLICATOR, _PAD_HEADS = "distributed_strategy.kv_replicator", "distributed_strategy.pad_heads"
_EXPERTS = "model.moe.num_experts"
_FOREIGN = "model.hf_config"
"""Where a model is described in another library's words; whether it has experts is seen when it is built."""


def find_impossible_layouts(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield what the engine on stock torch cannot lay out: the ``rules`` of its record."""
    for rule in RULES:
        yield from rule(settings)


def heads_divide(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield query heads that do not divide by the tensor parallel devices; ``pad_heads`` adds what is missing."""
    numbers = settings.numbers(_HEADS, TP)
    if numbers is None or settings.values.get(_PAD_HEADS):
        return
    heads, tp = numbers
    if heads % tp:
        yield ImpossibleCombination(
            **settings.place(_HEADS, TP),
            reason=f"{heads} does not divide by tensor_model_parallel_size {tp}",
            advice=f"Choose a tensor parallel size that divides {heads}, or set {_PAD_HEADS} to true.",
            cause=_misfit(settings, _HEADS, heads, tp),
        )


def kv_heads_divide(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Key and value heads are shared out, or each is copied to equally many devices; ``pad_heads`` adds heads."""
    numbers = settings.numbers(_KV_HEADS, TP, _KV_REPLICATOR)
    if numbers is None or settings.values.get(_PAD_HEADS):
        return
    heads, tp, copies = numbers
    if heads % tp and tp % heads:
        yield ImpossibleCombination(
            **settings.place(_KV_HEADS, TP),
            reason=f"{heads} key and value heads can neither be shared out nor copied evenly over"
            f" tensor_model_parallel_size {tp}",
            advice=f"Choose a tensor parallel size that divides {heads} or is a multiple of it.",
            cause=_misfit(settings, _KV_HEADS, heads, tp),
        )
    elif copies > 1 and heads * copies % tp:
        yield ImpossibleCombination(
            **settings.place(_KV_REPLICATOR, TP),
            reason=f"{heads} heads x kv_replicator {copies} does not divide by tensor_model_parallel_size {tp}",
            advice=f"Leave it out, or write {max(1, tp // heads)}.",
        )


def columns_divide(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Each tensor parallel device takes equal parts of the feed-forward block and of the vocabulary."""
    # Where the vocabulary is filled up, what it is filled up to is divided.
    filled = settings.numbers(_VOCAB_MULTIPLE) is not None
    for key in ("model.ffn_hidden_size", _VOCAB_MULTIPLE if filled else "model.vocab_size"):
        numbers = settings.numbers(key, TP)
        if numbers is not None and numbers[0] % numbers[1]:
            yield ImpossibleCombination(
                **settings.place(key, TP),
                reason=f"{numbers[0]} does not divide by tensor_model_parallel_size {numbers[1]}",
                advice=f"Choose a tensor parallel size that divides {numbers[0]}, or write a multiple of {numbers[1]}.",
                cause=_misfit(settings, key, *numbers),
            )


def _misfit(settings: Settings, key: str, number: int, tp: int) -> Misfit:
    return Misfit(of=TP, divisor=tp, place=settings.place(TP), name=key, number=number)


def experts_divide(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield expert parallelism over a number of experts that does not divide, or without experts."""
    sizes, experts = settings.numbers(EP), settings.numbers(_EXPERTS)
    if sizes is None or sizes[0] == 1 or settings.values.get(_FOREIGN):
        return
    if experts is None:
        yield ImpossibleCombination(
            **settings.place(EP),
            reason=f"EP {sizes[0]} shares out experts, and the model has none ({_EXPERTS} is not set)",
            advice="Set it to 1, or choose a model with experts.",
        )
    elif experts[0] % sizes[0]:
        yield ImpossibleCombination(
            **settings.place(_EXPERTS, EP),
            reason=f"{experts[0]} experts do not divide by expert_model_parallel_size {sizes[0]}",
            advice="Choose an expert parallel size that divides the experts.",
        )


def sequence_divides(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Context parallelism gives each device two parts of a sequence, sequence parallelism cuts what a device has."""
    numbers = settings.numbers("data.seq_length", CP, TP)
    if numbers is None:
        return
    length, cp, tp = numbers
    sharded = tp if settings.values.get("distributed_strategy.sequence_parallel") else 1
    parts = cp * math.lcm(2, sharded) if cp > 1 else sharded
    if length % parts:
        yield ImpossibleCombination(
            **settings.place("data.seq_length", CP, TP),
            reason=f"{length} tokens do not divide into {parts} equal parts (CP {cp}, TP {tp}"
            f"{' with sequence_parallel' if sharded > 1 else ''})",
            advice=f"Write a multiple of {parts}.",
        )


RULES = (
    heads_divide,
    kv_heads_divide,
    columns_divide,
    experts_divide,
    sequence_divides,
    shuffle_fits,
    async_tensor_parallel_fits,
    *STAGE_RULES,
    *TORCH_RULES,
)
"""In the order in which they are tried."""
