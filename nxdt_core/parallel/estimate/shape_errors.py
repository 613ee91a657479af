"""What a plan overlooks: a module whose shard cannot be computed, found by sending shapes through the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from nxdt_core.errors import NxdtError
from nxdt_core.errors.layouts import ShardNotComputed
from nxdt_core.nn.patterns import matches
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["name_shape_errors"]


@contextmanager
def name_shape_errors(stage: nn.Module, plan: ParallelPlan, *, tp: int) -> Iterator[None]:
    """Name the module, its parameters and the plan's entry for it where ``stage`` cannot run on its shards.

    Args:
        stage: in its layout.
        plan: of the model.
        tp: tensor-parallel ranks; with one rank an error of the model stays as it is.

    Raises:
        ShardNotComputed: the stage raises something else than an error of ours.
    """
    entered: list[str] = []
    paths = {module: path for path, module in stage.named_modules()}

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        entered.append(paths[module])

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        entered.pop()

    hooks = [hook for module in paths if tp > 1 for hook in _hooks(module, enter, leave)]
    try:
        yield
    except NxdtError:
        raise
    except Exception as error:
        if tp == 1:
            raise
        path = entered[-1] if entered else ""
        raise ShardNotComputed(
            model=type(stage).__name__,
            tp=tp,
            module=path,
            parameters=[
                f"{name} {list(p.shape)}" for name, p in stage.get_submodule(path).named_parameters(recurse=False)
            ],
            entry=_entry(plan, path),
            reason=str(error).partition("\n")[0].rstrip("."),
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(module: nn.Module, enter: Any, leave: Any) -> tuple[Any, Any]:
    return module.register_forward_pre_hook(enter, prepend=True), module.register_forward_hook(leave)


def _entry(plan: ParallelPlan, path: str) -> str:
    """Return the entry of ``plan`` that says what becomes of the module at ``path``."""
    style = next(
        (f"tensor '{pattern}': {style}" for pattern, style in plan.tensor.items() if matches(pattern, path)), ""
    )
    parts = path.split(".")
    outer = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    block = next((block for inside in outer for block in plan.tensor_blocks if matches(block, inside)), None)
    return style or (f"tensor_blocks '{block}'" if block else "")
