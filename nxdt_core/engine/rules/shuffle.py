"""Rules of ``token_shuffle_group_size``: which ranks exchange tokens, and that they have equally many."""

from __future__ import annotations

from collections.abc import Iterator

from nxdt_core.config.validate.sizes import CP, MICRO_BATCH, REPLICAS, TP, WORLD, mesh_sizes
from nxdt_core.errors.configuration import ImpossibleCombination
from nxdt_core.protocols.parallel.rules import Settings

__all__ = ["shuffle_fits"]

_SHUFFLE = "distributed_strategy.token_shuffle_group_size"
_EXPERTS = "model.moe.num_experts"
_LENGTH = "data.seq_length"


def shuffle_fits(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Groups are equal parts of the ranks that shard parameters, and deal out equal parts of their tokens."""
    numbers, sizes = settings.numbers(_SHUFFLE), mesh_sizes(settings)
    if numbers is None or numbers[0] == 1 or sizes is None:
        return
    (ranks,) = numbers
    if settings.numbers(_EXPERTS) is None:
        yield ImpossibleCombination(
            **settings.place(_SHUFFLE),
            reason=f"tokens are exchanged before experts, and the model has none ({_EXPERTS} is not set)",
            advice="Set it to 1, or choose a model with experts.",
        )
    elif sizes.dp_shard % ranks:
        yield ImpossibleCombination(
            **settings.place(_SHUFFLE, REPLICAS, *WORLD),
            reason=f"{sizes.dp_shard} data parallel ranks do not divide into groups of {ranks} that exchange tokens",
            advice=f"Choose a divisor of {sizes.dp_shard}.",
        )
    else:
        yield from _tokens_divide(settings, ranks)


def _tokens_divide(settings: Settings, ranks: int) -> Iterator[ImpossibleCombination]:
    numbers = settings.numbers(MICRO_BATCH, _LENGTH, CP, TP)
    if numbers is None:
        return
    rows, length, cp, tp = numbers
    parts = cp * (tp if settings.values.get("distributed_strategy.sequence_parallel") else 1)
    tokens, rest = divmod(rows * length, parts)
    if not rest and tokens % ranks:
        yield ImpossibleCombination(
            **settings.place(_SHUFFLE, MICRO_BATCH, _LENGTH),
            reason=f"a rank's {tokens} tokens of a micro-batch do not divide over {ranks} ranks that exchange them",
            advice=f"Choose a divisor of {tokens}.",
        )
