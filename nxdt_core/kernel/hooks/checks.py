"""Checks a plugin's hook implementations before pluggy sees them, so that every pluggy release behaves the same.

Pluggy itself registers a misspelt hook silently, keeps a plugin registered whose check failed (1.5, 1.6), never
fills arguments that have defaults (1.5, 1.6) and triggers lazy ``__getattr__`` imports (1.5, 1.6).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from nxdt_core.api import PROJECT
from nxdt_core.kernel.defect import PluginDefect

__all__ = ["MARK", "HookSet", "collect_hooks", "hook_signature", "signature_of"]

MARK: Final = f"{PROJECT}_impl"
"""Attribute in which pluggy's marker keeps its options on a function."""
_PREFIX: Final = "nxdt_"


class HookSet:
    """The checked implementations of one plugin, as attributes: what is registered with pluggy.

    The plugin's module itself is never given to pluggy, so nothing else in it is looked at.
    """

    def __init__(self, implementations: Mapping[str, Callable[..., Any]]) -> None:
        self.__dict__.update(implementations)

    def __dir__(self) -> list[str]:
        """The hooks alone: pluggy looks at every name that this lists."""
        return list(self.__dict__)


def collect_hooks(plugin: object, specifications: Mapping[str, inspect.Signature]) -> HookSet:
    """Gather the marked functions of a module (or of the object that an entry point names) and check each.

    Args:
        plugin: What the entry point names.
        specifications: Signature of every hook by name.

    Raises:
        PluginDefect: an unknown hook, an argument that the hook does not have or that has a default, a wrapper,
            or an unmarked function with a hook's name.
    """
    implementations: dict[str, Callable[..., Any]] = {}
    for name, value in _namespace(plugin):
        options = getattr(value, MARK, None)
        if isinstance(options, dict):
            implementations[name] = value
            _check(name, value, options, specifications)
        elif name in specifications and inspect.isfunction(value):
            raise PluginDefect(f"{hook_signature(name, value)} is not marked with @hookimpl")
    return HookSet(implementations)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a callable; that of a function is worked out once, since kernels are started often."""
    return _known_signature(function) if inspect.isfunction(function) else inspect.signature(function)


_known_signature = lru_cache(maxsize=4096)(inspect.signature)
"""Of functions alone: another callable need not be hashable."""


def hook_signature(name: str, function: Callable[..., Any]) -> str:
    """``nxdt_validate_config(context)``, for messages."""
    return f"{name}{signature_of(function)}"


def _namespace(plugin: object) -> Iterator[tuple[str, Any]]:
    """Names and values of the plugin without running any of its descriptors or a module's ``__getattr__``."""
    if inspect.ismodule(plugin):
        yield from list(vars(plugin).items())
        return
    for name in sorted(
        {name for klass in _classes(plugin) for name in vars(klass)} | set(_instance_attributes(plugin))
    ):
        static = inspect.getattr_static(plugin, name, None)
        if inspect.isroutine(static):
            yield name, getattr(plugin, name)


def _classes(plugin: object) -> tuple[type, ...]:
    return plugin.__mro__ if inspect.isclass(plugin) else type(plugin).__mro__


def _instance_attributes(plugin: object) -> dict[str, Any]:
    return {} if inspect.isclass(plugin) else getattr(plugin, "__dict__", {})


def _check(
    name: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    specifications: Mapping[str, inspect.Signature],
) -> None:
    hook = options.get("specname") or name
    specification = specifications.get(hook)
    if specification is None:
        close = difflib.get_close_matches(hook, specifications, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; hooks begin with {_PREFIX!r}"
        raise PluginDefect(f"{hook_signature(name, function)} implements no hook{hint}")
    if options.get("wrapper") or options.get("hookwrapper"):
        raise PluginDefect(f"{hook_signature(name, function)} is a wrapper; plugins do not wrap each other's hooks")
    if inspect.iscoroutinefunction(function):
        raise PluginDefect(f"{hook_signature(name, function)} is a coroutine; hooks are called plainly")
    for parameter in signature_of(function).parameters.values():
        defect = _defect_of(parameter, hook, specification)
        if defect:
            raise PluginDefect(f"{hook_signature(name, function)} {defect}")


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
