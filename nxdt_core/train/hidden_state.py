"""Finds state that no checkpoint keeps: what changes from step to step outside of what is saved.

Each probe looks at the first steps of a run alone. What it finds is a warning: an attribute may
be a cache whose loss changes nothing, and the probe cannot see that. A run looks at the components of plugins; tests
look at the core's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from nxdt_core.distributed.devices import profile_of
from nxdt_core.errors.training import HiddenObjectiveState, HiddenOptimizerState, ImpureSchedule
from nxdt_core.kernel.registry import RegisteredComponent
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.schedule import LRSchedule

_log = logging.getLogger(__name__)

_LOOKS = 3
"""Steps after which a probe looks: a value that only the first step changes may be created there and stay constant."""
_DEPTH = 5
_OF_TORCH = {"state", "defaults", "found_inf", "grad_scale", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
"""Attributes of each ``torch.optim.Optimizer`` that are saved, constant or the loop's own."""
_OF_THE_PROGRAM = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial)
"""Types whose attributes contain no state of a run."""
_OF_THE_CORE = {"params", "lr", "initial_lr"}
"""Keys of a parameter group that follow from the configuration and the schedule."""


def check_schedule(schedule: LRSchedule, component: RegisteredComponent, *, max_steps: int) -> None:
    """Warn about a learning-rate schedule whose factor depends on more than the step.

    Args:
        schedule: one that no run uses, because a schedule that counts its calls is unusable afterwards.
        component: the component that built it.
        max_steps: steps that it is made for.
    """
    steps = sorted({0, max_steps // 2})
    first, again = [schedule(step) for step in steps], [schedule(step) for step in steps]
    for step, one, other in zip(steps, first, again, strict=True):
        if one != other:
            name = component.record.name
            _log.warning("%s", ImpureSchedule(name=name, dist=component.dist, step=step, first=one, second=other))
            return


def watch_optimizer(optimizer: torch.optim.Optimizer, component: RegisteredComponent) -> None:
    """Warn once, within the first steps of ``optimizer``, of what it keeps outside of its parameters' state."""

    def report(names: list[str]) -> None:
        _log.warning("%s", HiddenOptimizerState(name=component.record.name, dist=component.dist, attributes=names))

    find_hidden_state(optimizer, report)


def find_hidden_state(optimizer: torch.optim.Optimizer, report: Callable[[list[str]], None]) -> None:
    """Call ``report`` once, within the first steps of ``optimizer``, with the names of what it keeps outside of its
    parameters' state; never where there is nothing."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def look() -> dict[str, Any]:
        hidden = {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH | {"param_groups"}}
        for number, group in enumerate(optimizer.param_groups):
            kept_nowhere = {key: value for key, value in group.items() if key not in _OF_THE_CORE}
            hidden |= {f"param_groups[{number}][{key!r}]": value for key, value in kept_nowhere.items()}
        lost = {f"state[{key!r}]": object() for key in optimizer.state if id(key) not in parameters}
        return _values(optimizer, hidden, set(parameters)) | lost

    _watch(optimizer, look, report)


def watch_objective(objective: Objective, optimizer: torch.optim.Optimizer, component: RegisteredComponent) -> None:
    """Warn once, within the first steps of ``optimizer``, of an objective that changes from step to step."""

    def report(names: list[str]) -> None:
        _log.warning("%s", HiddenObjectiveState(name=component.record.name, dist=component.dist, attributes=names))

    def look() -> dict[str, Any]:
        attributes = {name: value for name, value in vars(objective).items() if name not in objective.step_results}
        return _values(objective, attributes, set())

    _watch(optimizer, look, report)


def _watch(
    optimizer: torch.optim.Optimizer, look: Callable[[], dict[str, Any]], report: Callable[[list[str]], None]
) -> None:
    """Compare what ``look`` sees after each of the first steps.

    The hook stays, without effect: torch lets no hook remove itself while it runs.
    """
    seen: list[dict[str, Any]] = []

    def after_step(*_: Any) -> None:
        if len(seen) == _LOOKS:
            return
        seen.append(look())
        if len(seen) == _LOOKS:
            changed = {
                name
                for before, after in pairwise(seen)
                for name in before.keys() & after.keys()
                if before[name] != after[name]
            }
            seen[:] = [{}] * _LOOKS  # values need not stay
            if changed:
                report(sorted(changed))

    optimizer.register_step_post_hook(after_step)


def _values(owner: object, attributes: Mapping[str, Any], seen: set[int]) -> dict[str, Any]:
    """Return a comparable value of each number and tensor below ``attributes``, by its path."""
    seen.add(id(owner))
    return dict(leaf for name, value in attributes.items() for leaf in _below(value, name, seen, _DEPTH))


def _below(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (bool, int, float, complex, str)):
        yield path, value if value == value else "nan"
        return
    if id(value) in seen or depth == 0 or isinstance(value, _OF_THE_PROGRAM):
        return
    seen.add(id(value))
    step = partial(_below, seen=seen, depth=depth - 1)
    if isinstance(value, torch.Tensor):
        yield path, _digest(value)
    elif isinstance(value, torch.Generator):
        yield path, value.get_state().numpy().tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from step(item, f"{path}[{key!r}]" if isinstance(key, (str, int)) else path)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield f"{path} (length)", len(value)
        for number, item in enumerate(value):
            yield from step(item, f"{path}[{number}]")
    else:
        for name, item in getattr(value, "__dict__", {}).items():
            yield from step(item, f"{path}.{name}")


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return values that differ where the tensors do, but for a coincidence; makes no copy of the tensor's size."""
    if tensor.is_meta or tensor.numel() == 0:
        return (tuple(tensor.shape),)
    value = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    wide = torch.float64 if profile_of(tensor.device).host else torch.float32
    squares = torch.linalg.vector_norm(value, dtype=wide) if value.is_floating_point() else value.sum()
    return tuple(tensor.shape), repr(value.sum(dtype=wide).item()), repr(squares.item())
