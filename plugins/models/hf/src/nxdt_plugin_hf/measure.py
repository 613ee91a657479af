"""Measurement of the parameters that tensor parallelism makes smaller, on the meta device after it has been applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nxdt_core.models.patterns import matches
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_plugin_hf.builder import HFBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Sizes of one model's parameters over ``tp`` ranks."""

    model: str
    tp: int
    elements: Mapping[str, tuple[int, int]]
    """Elements of each parameter: all, and those that rank 0 holds."""
    unmatched: tuple[str, ...]
    """Patterns of transformers' plan that name nothing in this model."""

    @property
    def cut(self) -> tuple[str, ...]:
        """Parameters that became smaller."""
        return tuple(name for name, (whole, held) in self.elements.items() if held < whole)

    @property
    def whole(self) -> tuple[str, ...]:
        """Names of the parameters that stayed whole."""
        cut = {*self.cut}
        return tuple(name for name in self.elements if name not in cut)

    @property
    def share(self) -> float:
        """Part of all elements that rank 0 holds."""
        return sum(held for _, held in self.elements.values()) / sum(whole for whole, _ in self.elements.values())


def measure_sharding(builder: HFBuilder, tp: int, engine: type[ParallelEngine]) -> Sharding:
    """Let ``engine`` apply the builder's plan as rank 0 of ``tp``, in a process that is in no process group.

    Raises:
        LayoutRefused: the plan that the model brings names what cannot be sharded.
        HeadsDoNotDivide, ShardDoesNotDivide, TensorPlanUnusable: of the engine.
    """
    with torch.device("meta"):
        model, plain = builder.build(), builder.architecture.plain()
    named = [path for path, _ in (*plain.named_modules(), *plain.named_parameters())]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    held = engine.local_elements(builder, MeshSizes(tp=tp))
    return Sharding(
        model=builder.architecture.name,
        tp=tp,
        elements={name: (size, held[name]) for name, size in sizes.items()},
        unmatched=tuple(pattern for pattern in plain.tp_plan if not any(matches(pattern, path) for path in named)),
    )
