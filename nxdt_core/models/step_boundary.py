"""The step context where a signature has no room for it: the boundary to modules and functions of other authors.

Models and objectives of this project pass :class:`~nxdt_core.protocols.step_context.StepContext` on as the argument
``step``. Some calls between them and our building blocks have another author's signature: those of transformers'
modules, of ``torch.nn.Linear`` with an adapter's update, and of experts behind a dispatcher. For these, the context is
set here around the call, and :func:`step_of` reads it where no argument arrives.

An attribute and not a ``ContextVar``, whose ``get`` breaks the graphs of ``torch.compile``. It is of the process and
not of a thread: autograd recomputes in its own threads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from nxdt_core.models.updates import Update
from nxdt_core.protocols.step_context import StepContext


class _StepBoundary:
    def __init__(self) -> None:
        self.step = StepContext()  # not one of the class: a graph would be compiled again once the instance has its own


_BOUNDARY = _StepBoundary()


class at_step_boundary(AbstractContextManager[None]):
    """Set the context within the block for callees that have no argument ``step``. The block may be entered again: a
    backward that is split recomputes twice."""

    def __init__(self, step: StepContext) -> None:
        self._step = step
        self._before: list[StepContext] = []

    def __enter__(self) -> None:
        self._before.append(_BOUNDARY.step)
        _BOUNDARY.step = self._step

    def __exit__(self, *_: object) -> None:
        _BOUNDARY.step = self._before.pop()


def step_of(step: StepContext | None) -> StepContext:
    """Return the argument, or where it is None the context of the boundary; the default one outside of both."""
    return _BOUNDARY.step if step is None else step


def takes_step(called: Any) -> bool:
    """Return whether a module's forward, or a function, has the parameter ``step``, with any annotation."""
    forward = getattr(called, "forward", called)
    function = forward if inspect.isroutine(forward) else type(forward).__call__
    return _has_step(getattr(function, "__func__", function))


@functools.cache
def _has_step(function: Any) -> bool:
    return "step" in inspect.signature(function).parameters


def called_with_step(called: Any, step: StepContext, *args: Any) -> Any:
    """Return ``called(*args)`` of an objective or a model, with ``step`` as an argument or else at the boundary."""
    if takes_step(called):
        return called(*args, step=step)
    with at_step_boundary(step):
        return called(*args)


def accept_step(module: nn.Module) -> None:
    """Give the forward of a model or a pipeline stage the parameter ``step`` where it has none, in place.

    Where adapters have added updates, the boundary is set, too: the linear layers around these have torch's signature.
    """
    takes = takes_step(module)
    if not takes or any(isinstance(part, Update) for part in module.modules()):
        module.forward = _AcceptingStep(module.forward, takes=takes)


class _AcceptingStep:
    """A forward with the parameter ``step``, around another one."""

    def __init__(self, forward: Callable[..., Any], *, takes: bool) -> None:
        self._forward, self._takes = forward, takes

    def __call__(self, *args: Any, step: StepContext | None = None, **kwargs: Any) -> Any:
        if self._takes:
            kwargs["step"] = step
        with at_step_boundary(step_of(step)):
            return self._forward(*args, **kwargs)
