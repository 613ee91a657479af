"""Hooks: what may implement one, and the checked implementations of a plugin, which pluggy orders and calls.

``kernel.hooks`` is pluggy's: ``kernel.hooks.nxdt_validate_config(context=context)``. Each result that is not None is a
:class:`HookResult`, since pluggy's results do not say whose they are. Pluggy registers a misspelt hook silently, and
its releases differ in what they check. Therefore implementations are checked before pluggy sees them.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, wraps
from time import perf_counter
from typing import Any, Final, Generic, TypeVar

from nxdt_core.api import PROJECT
from nxdt_core.errors import NxdtError
from nxdt_core.errors.plugins import PluginHookFailed
from nxdt_core.kernel import hookspecs
from nxdt_core.kernel.plugin import PluginDefect, PluginInfo, describe_failure

T = TypeVar("T")

_MARK: Final = f"{PROJECT}_impl"
"""Attribute in which pluggy's marker keeps its options on a function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookResult(Generic[T]):
    """What one plugin returned."""

    plugin: str
    dist: str
    value: T


@dataclass(frozen=True, slots=True, kw_only=True)
class HookCall:
    """One call of an implementation, as :func:`traced_hooks` keeps it."""

    hook: str
    plugin: str
    dist: str
    seconds: float
    outcome: str
    """``value``, ``none`` or ``failed``."""


class HookSet:
    """The checked implementations of one plugin, as attributes: what is registered with pluggy.

    The plugin's module itself is never given to pluggy, so nothing else in it is looked at.
    """

    __slots__ = ("__dict__", "_by_hook")

    def __init__(self, implementations: Mapping[str, Callable[..., Any]]) -> None:
        self.__dict__.update(implementations)
        self._by_hook: dict[str, list[Callable[..., Any]]] = {}
        for name, implementation in implementations.items():
            hook = getattr(implementation, _MARK).get("specname") or name
            self._by_hook.setdefault(hook, []).append(implementation)

    def __dir__(self) -> list[str]:
        """The hooks alone: pluggy looks at every name that this lists."""
        return list(self.__dict__)

    def implements(self, hook: str) -> bool:
        """Return whether this plugin has an implementation of a hook."""
        return hook in self._by_hook

    def call(self, hook: str) -> list[Any]:
        """Return what this plugin alone gives for a hook without arguments; mostly nothing or one value."""
        results = [implementation() for implementation in self._by_hook.get(hook, ())]
        return [result.value for result in results if result is not None]


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


def collect_hooks(plugin: PluginInfo, loaded: object) -> HookSet:
    """Gather the marked functions of a module (or of the object that an entry point names) and check each.

    Args:
        plugin: Whose they are.
        loaded: What its entry point names.

    Raises:
        PluginDefect: an unknown hook, an argument that the hook does not have or that has a default, a wrapper,
            or an unmarked function with a hook's name.
    """
    implementations: dict[str, Callable[..., Any]] = {}
    for name, value in _namespace(loaded):
        options = getattr(value, _MARK, None)
        if isinstance(options, dict):
            hook = options.get("specname") or name
            _check(name, value, hook, options)
            implementations[name] = _attributed(plugin, hook, value)
        elif name in hookspecs.HOOKS and inspect.isfunction(value):
            raise PluginDefect(f"{name}{inspect.signature(value)} is not marked with @hookimpl")
    return HookSet(implementations)


def _attributed(plugin: PluginInfo, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with the plugin's name on its result and its failure.

    What it raises becomes :class:`PluginHookFailed`; an :class:`NxdtError` passes as it is.
    """

    @wraps(function)  # with its mark, and with its signature as pluggy reads it
    def implementation(*arguments: Any) -> HookResult[Any] | None:
        calls, begun, outcome = _TRACE.get(), perf_counter(), "failed"
        try:
            value = function(*arguments)
            outcome = "none" if value is None else "value"
        except (NxdtError, KeyboardInterrupt):
            raise
        except BaseException as error:
            reason = describe_failure(error)
            raise PluginHookFailed(plugin=plugin.name, dist=plugin.dist, hook=hook, reason=reason) from error
        finally:
            if calls is not None:
                seconds = perf_counter() - begun
                calls.append(
                    HookCall(hook=hook, plugin=plugin.name, dist=plugin.dist, seconds=seconds, outcome=outcome)
                )
        return None if value is None else HookResult(plugin=plugin.name, dist=plugin.dist, value=value)

    return implementation


_known_signature = lru_cache(maxsize=4096)(inspect.signature)
"""Of a function; kept, since kernels are started often."""


def _namespace(loaded: object) -> Iterator[tuple[str, Any]]:
    """Names and values of the plugin without running any of its descriptors or a module's ``__getattr__``."""
    if inspect.ismodule(loaded):
        yield from list(vars(loaded).items())
        return
    classes = loaded.__mro__ if inspect.isclass(loaded) else type(loaded).__mro__
    instance = {} if inspect.isclass(loaded) else getattr(loaded, "__dict__", {})
    for name in sorted({name for each in classes for name in vars(each)} | set(instance)):
        if inspect.isroutine(inspect.getattr_static(loaded, name, None)):
            yield name, getattr(loaded, name)


def _check(name: str, function: Callable[..., Any], hook: str, options: Mapping[str, Any]) -> None:
    signature = _known_signature(function) if inspect.isfunction(function) else inspect.signature(function)
    specification, shown = hookspecs.HOOKS.get(hook), f"{name}{signature}"
    if specification is None:
        close = difflib.get_close_matches(hook, hookspecs.HOOKS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; hooks begin with '{PROJECT}_'"
        raise PluginDefect(f"{shown} implements no hook{hint}")
    if options.get("wrapper") or options.get("hookwrapper"):
        raise PluginDefect(f"{shown} is a wrapper; plugins do not wrap each other's hooks")
    if inspect.iscoroutinefunction(function):
        raise PluginDefect(f"{shown} is a coroutine; hooks are called plainly")
    for parameter in signature.parameters.values():
        defect = _defect_of(parameter, hook, _known_signature(specification))
        if defect:
            raise PluginDefect(f"{shown} {defect}")


def _defect_of(parameter: inspect.Parameter, hook: str, specification: inspect.Signature) -> str:
    """What is wrong with an argument of an implementation; empty where nothing is."""
    if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return f"takes {parameter}; a hook's arguments are plain names"
    if parameter.name not in specification.parameters:
        allowed = ", ".join(specification.parameters) or "no argument"
        close = difflib.get_close_matches(parameter.name, specification.parameters, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"has the argument {parameter.name!r}; {hook} takes {allowed}{hint}"
    if parameter.default is not inspect.Parameter.empty:
        return f"gives {parameter.name!r} a default; write the plain name, it is always passed"
    return ""
