"""Detection of modules that a plan overlooks: shapes sent through the model find a shard that cannot be computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.distributed.placement import local_of
from nxdt_core.errors import NxdtError
from nxdt_core.errors.layouts import LAYOUT_KEYS, ShardNotComputed
from nxdt_core.models.patterns import matches
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["name_shape_errors"]

_NOT_THE_PLAN = (NxdtError, torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError, IndexError)
"""Errors of a forward on any number of ranks: lack of memory, lost ranks, token ids beyond the vocabulary."""
_TRANSPORT = ("Connection closed", "Connection reset")
"""Words in the plain RuntimeError that the host's backend raises where another rank has ended, next to its name."""


@contextmanager
def name_shape_errors(stages: Sequence[nn.Module], plan: ParallelPlan, sizes: MeshSizes) -> Iterator[None]:
    """Name the module, its parameters and the plan's entry where a stage cannot run on its shards within the block.

    Args:
        stages: of this rank, in their layout; not compiled, since that would take the hooks in.
        plan: of the whole model; the error names the entry that matches the module.
        sizes: of the mesh; where it does not shard the model, an error of the model stays as it is.

    Raises:
        ShardNotComputed: a stage raises something else than an error of ours.
    """
    entered: list[str] = []
    sharded = {name: size for name, size in sizes.as_dict().items() if name in LAYOUT_KEYS and size > 1}
    if not sharded:
        yield
        return
    paths = {module: path for stage in stages for path, module in stage.named_modules()}

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        entered.append(paths[module])

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        entered.pop()

    hooks = [module.register_forward_pre_hook(enter, prepend=True) for module in paths]
    hooks += [module.register_forward_hook(leave) for module in paths]
    try:
        yield
    except _NOT_THE_PLAN:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch's pipelines wrap what a stage raises
            cause = cause.__cause__
        outside = not entered  # in the objective or in backward: not what a module computes
        transport = (profile_of(HOST).process_group_backend, *_TRANSPORT)
        if outside or isinstance(cause, _NOT_THE_PLAN) or any(word in str(cause) for word in transport):
            raise
        path = entered[-1]
        failed = next((module for module, module_path in paths.items() if module_path == path), stages[0])
        raise ShardNotComputed(
            model=type(stages[0]).__name__,
            sizes=sharded,
            module=path,
            parameters=[f"{name} {list(local_of(p).shape)}" for name, p in failed.named_parameters(recurse=False)],
            entry=_entry(plan, path),
            reason=str(cause).partition("\n")[0].rstrip("."),
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _entry(plan: ParallelPlan, path: str) -> str:
    """Return the entry of ``plan`` that says what becomes of the module at ``path``."""
    style = next(
        (f"tensor '{pattern}': {style}" for pattern, style in plan.tensor.items() if matches(pattern, path)), ""
    )
    parts = path.split(".")
    outer = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    block = next((block for inside in outer for block in plan.tensor_blocks if matches(block, inside)), None)
    return style or (f"tensor_blocks '{block}'" if block else "")
