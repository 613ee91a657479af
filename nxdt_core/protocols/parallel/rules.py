"""Rules of an engine: layouts that it declares and cannot run with these values. No torch.

A record names them (``EngineComponent.rules``); ``nxdt config check``, ``nxdt plan`` and ``nxdt train`` call them.

Example::

    def find_impossible_layouts(settings):
        heads, tp = "model.num_attention_heads", "distributed_strategy.tensor_model_parallel_size"
        numbers = settings.numbers(heads, tp)
        if numbers is not None and numbers[0] % numbers[1]:
            yield ImpossibleCombination(
                **settings.place(heads, tp),
                reason=f"{numbers[0]} is not divisible by tensor_model_parallel_size {numbers[1]}",
                advice=f"Choose a tensor parallel size that divides {numbers[0]}.",
            )
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from nxdt_core.errors.configuration import ConfigProblem

__all__ = ["EngineRules", "Settings"]


class Settings(Protocol):
    """The values of a configuration as rules see them, and where each was written."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Typed values by key path; a wrong one is absent, and rules that need it yield nothing."""
        ...

    def numbers(self, *keys: str) -> tuple[int, ...] | None:
        """Return the values of ``keys``, or None where one of them is absent, ``null`` or not a number."""
        ...

    def place(self, *keys: str) -> Any:
        """Return the place of a problem between ``keys``: keywords of every :class:`ConfigProblem`."""
        ...


class EngineRules(Protocol):
    """The function that a record names."""

    def __call__(self, settings: Settings) -> Iterable[ConfigProblem]:
        """Yield a problem for each layout that the engine cannot run; mostly
        :class:`nxdt_core.errors.configuration.ImpossibleCombination`."""
        ...
