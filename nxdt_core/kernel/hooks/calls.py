"""Calls the implementations of one hook, each with its plugin's name, and decides what a failure does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, TypeVar

from nxdt_core.errors import NxdtError
from nxdt_core.errors.plugins import PluginHookFailed
from nxdt_core.kernel.defect import GUARDED, describe_failure

__all__ = ["HookCall", "HookCalls", "HookResult", "Implementation", "traced_hooks"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HookCall:
    """One call of an implementation, as :func:`traced_hooks` keeps it."""

    hook: str
    plugin: str
    dist: str
    seconds: float
    outcome: str
    """``value``, ``none`` or ``failed``."""


_TRACE: ContextVar[list[HookCall] | None] = ContextVar("nxdt_hook_trace", default=None)


@contextmanager
def traced_hooks() -> Iterator[list[HookCall]]:
    """Keep every call of an implementation within the block, in order.

    Yields:
        The calls, as they end.
    """
    calls: list[HookCall] = []
    token = _TRACE.set(calls)
    try:
        yield calls
    finally:
        _TRACE.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class HookResult(Generic[T]):
    """What one plugin returned. (Pluggy's own results do not say whose they are.)"""

    plugin: str
    dist: str
    value: T


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One plugin's function for one hook."""

    plugin: str
    dist: str
    function: Callable[..., Any]
    takes_context: bool
    """Whether it has the argument ``context``; leaving it out is allowed."""

    def __call__(self, context: object) -> Any:
        """Call with the context or without, as the function asks."""
        return self.function(context) if self.takes_context else self.function()


class HookCalls:
    """Implementations by hook name, in calling order."""

    __slots__ = ("_by_hook",)

    def __init__(self, by_hook: Mapping[str, tuple[Implementation, ...]]) -> None:
        self._by_hook = by_hook

    def implementations(self, hook: str) -> tuple[Implementation, ...]:
        """Return the implementations of a hook, in calling order: ``tryfirst``, then by distribution and entry point,
        then ``trylast``."""
        return self._by_hook.get(hook, ())

    def collect(self, hook: str, context: object = None) -> Iterator[HookResult[Any]]:
        """Call all; yields the results that are not None.

        Raises:
            PluginHookFailed: an implementation raised; an :class:`~nxdt_core.errors.NxdtError` passes as it is.
        """
        for implementation in self._by_hook.get(hook, ()):
            value = _call(hook, implementation, context)
            if value is not None:
                yield HookResult(plugin=implementation.plugin, dist=implementation.dist, value=value)


def _call(hook: str, implementation: Implementation, context: object) -> Any:
    try:
        return _timed(hook, implementation, context)
    except NxdtError:
        raise
    except GUARDED as error:
        raise PluginHookFailed(
            plugin=implementation.plugin, dist=implementation.dist, hook=hook, reason=describe_failure(error)
        ) from error


def _timed(hook: str, implementation: Implementation, context: object) -> Any:
    """Call an implementation; inside :func:`traced_hooks`, keep how long it took and how it ended."""
    calls = _TRACE.get()
    if calls is None:
        return implementation(context)
    begun, outcome = perf_counter(), "failed"
    try:
        value = implementation(context)
        outcome = "none" if value is None else "value"
        return value
    finally:
        plugin, dist = implementation.plugin, implementation.dist
        calls.append(HookCall(hook=hook, plugin=plugin, dist=dist, seconds=perf_counter() - begun, outcome=outcome))
