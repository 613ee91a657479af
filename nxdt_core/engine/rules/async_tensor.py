"""Rules of ``async_tensor_parallel``: what torch's pass over compiled graphs needs."""

from __future__ import annotations

from collections.abc import Iterator

from nxdt_core.config.validate.sizes import TP, WORLD
from nxdt_core.errors.configuration import ImpossibleCombination
from nxdt_core.protocols.parallel.rules import Settings

__all__ = ["async_tensor_parallel_fits"]

_ASYNC = "distributed_strategy.async_tensor_parallel"
_SP, _COMPILE = "distributed_strategy.sequence_parallel", "model.compile"
_REGATHER = "distributed_strategy.sequence_parallel_regather"


def async_tensor_parallel_fits(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Layers are compiled, gather and scatter sequences, and their ranks are on one machine."""
    numbers = settings.numbers(TP, *WORLD)
    if not settings.values.get(_ASYNC) or numbers is None or numbers[0] == 1:
        return
    tp, devices, _ = numbers
    for key, reason in (
        (_SP, "without sequence_parallel, ranks sum whole tensors, and no product can begin with a part of one"),
        (_COMPILE, "torch.compile puts products and collectives together"),
    ):
        if not settings.values.get(key):
            yield ImpossibleCombination(
                **settings.place(_ASYNC, key),
                reason=f"async_tensor_parallel needs {key}=true: {reason}",
                advice=f"Set {key}=true, or {_ASYNC}=false.",
            )
    if settings.values.get(_REGATHER):
        yield ImpossibleCombination(
            **settings.place(_ASYNC, _REGATHER),
            reason="the pass of async_tensor_parallel knows no gather of backward that another operation has begun, as"
            " sequence_parallel_regather does",
            advice=f"Set {_ASYNC}=false or {_REGATHER}=false.",
        )
    if devices % tp:
        yield ImpossibleCombination(
            **settings.place(_ASYNC, TP, *WORLD),
            reason=f"async_tensor_parallel needs tensor parallel ranks that share memory, and groups of {tp} are not"
            f" on one machine of {devices} devices",
            advice=f"Choose a tensor parallel size that divides {devices}, or set {_ASYNC}=false.",
        )
