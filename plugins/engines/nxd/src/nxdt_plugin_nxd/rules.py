"""Layouts that the engine declares and cannot run with these values. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from nxdt_core.config.validate.sizes import BATCH, MICRO_BATCH, PP, TP, mesh_sizes, micro_batches
from nxdt_core.errors.configuration import ConfigProblem, ImpossibleCombination
from nxdt_core.protocols.parallel.rules import Settings

__all__ = ["RULES", "find_impossible_layouts"]

_HEADS, _KV_HEADS = "model.num_attention_heads", "model.num_kv_heads"
_VOCABULARY, _VOCAB_MULTIPLE = "model.vocab_size", "model.make_vocab_size_divisible_by"
_FEED_FORWARD, _LENGTH = "model.ffn_hidden_size", "data.seq_length"
_LAYERS, _CUTS = "model.num_layers", "model.pipeline_cuts"
_CHUNKS = "model.loss_chunk_tokens"
_SP = "distributed_strategy.sequence_parallel"


def find_impossible_layouts(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield what the engine cannot lay out: the ``rules`` of its record."""
    for rule in RULES:
        yield from rule(settings)


def parts_are_equal(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Each tensor parallel rank takes as many heads, feed-forward columns, vocabulary rows and tokens as the others."""
    filled = settings.numbers(_VOCAB_MULTIPLE) is not None
    keys = [_HEADS, _FEED_FORWARD, _VOCAB_MULTIPLE if filled else _VOCABULARY]
    if settings.values.get(_SP):
        keys.append(_LENGTH)
    for key in keys:
        numbers = settings.numbers(key, TP)
        if numbers is not None and numbers[0] % numbers[1]:
            yield ImpossibleCombination(
                **settings.place(key, TP),
                reason=f"{numbers[0]} is not divisible by tensor_model_parallel_size {numbers[1]}",
                advice=f"Choose a tensor parallel size that divides {numbers[0]}, or a multiple of {numbers[1]}.",
            )


def key_heads_are_shared(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Key and value heads are divided among the ranks, or each is copied to equally many."""
    numbers = settings.numbers(_KV_HEADS, TP)
    if numbers is not None and numbers[0] % numbers[1] and numbers[1] % numbers[0]:
        heads, tp = numbers
        yield ImpossibleCombination(
            **settings.place(_KV_HEADS, TP),
            reason=f"{heads} key and value heads can be neither divided nor copied evenly over"
            f" tensor_model_parallel_size {tp}",
            advice=f"Choose a tensor parallel size that divides {heads} or is a multiple of it.",
        )


def layers_divide(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Pipeline stages take equally many layers, unless ``model.pipeline_cuts`` names the cuts."""
    numbers, cuts = settings.numbers(_LAYERS, PP), settings.values.get(_CUTS)
    if numbers is None:
        return
    layers, pp = numbers
    if cuts and pp > 1 and len(cuts) != pp - 1:
        yield ImpossibleCombination(
            **settings.place(_CUTS, PP),
            reason=f"{len(cuts)} cuts make {len(cuts) + 1} stages, and pipeline_model_parallel_size is {pp}",
            advice=f"Name {pp - 1} cuts.",
        )
    elif not cuts and layers % pp:
        yield ImpossibleCombination(
            **settings.place(_LAYERS, PP),
            reason=f"{layers} layers are not divisible by pipeline_model_parallel_size {pp}",
            advice=f"Choose a size that divides the layers, or name the cuts in {_CUTS}.",
        )


def pipeline_is_filled(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Each step has at least one micro-batch per pipeline stage."""
    sizes, count = mesh_sizes(settings), micro_batches(settings)
    if sizes is None or count is None or sizes.pp == 1 or count >= sizes.pp:
        return
    yield ImpossibleCombination(
        **settings.place(BATCH, MICRO_BATCH, PP),
        reason=f"each data parallel rank has {count} micro-batches per step, and 1F1B over {sizes.pp} stages needs"
        f" at least {sizes.pp}",
        advice=f"Write {sizes.pp * sizes.dp * settings.values[MICRO_BATCH]} or more, or change {MICRO_BATCH}.",
    )


def losses_are_whole(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Check the loss: the library's cross-entropy takes all tokens of a micro-batch at once."""
    if settings.values.get(_CHUNKS):
        yield ImpossibleCombination(
            **settings.place(_CHUNKS),
            reason="the engine nxd computes the losses of a micro-batch at once",
            advice="Set it to null, or use parallel_engine.name=torch.",
        )


RULES = (parts_are_equal, key_heads_are_shared, layers_divide, pipeline_is_filled, losses_are_whole)
"""In the order in which they are tried."""
