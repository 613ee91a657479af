"""Hooks: which functions of a plugin implement one, and calls that say whose result or failure it is.

Plugins are registered with pluggy, which orders their functions and compares their arguments with the specifications.
:class:`HookManager` adds what pluggy lets pass silently.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pluggy

from nxdt_core.api import PROJECT
from nxdt_core.errors import NxdtError
from nxdt_core.errors.plugins import PluginHookFailed
from nxdt_core.kernel import hookspecs
from nxdt_core.kernel.plugin import PluginDefect, describe_failure


@dataclass(frozen=True, slots=True, kw_only=True)
class HookCall:
    """One call of an implementation."""

    hook: str
    plugin: str
    dist: str
    seconds: float
    outcome: str
    """``value``, ``none`` or ``failed``."""


class HookManager(pluggy.PluginManager):
    """A pluggy manager of this package's hooks, which refuses functions that would never be called as they are meant.

    Pluggy ignores a misspelt hook and a function without the marker, and passes nothing to an argument that has a
    default. Plugins do not wrap each other's hooks.
    """

    def __init__(self) -> None:
        super().__init__(PROJECT)
        self.add_hookspecs(hookspecs)
        self.calls: list[HookCall] = []
        """Every call of an implementation, in the order in which they ended."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> pluggy.HookimplOpts | None:
        """Return the options of the function ``name`` of a plugin; None where it implements no hook.

        Raises:
            PluginDefect: it looks like an implementation of a hook and is none.
        """
        if name.startswith("__"):
            return None
        # Neither a property nor a lazy attribute of a module is read. (`getattr_static` of modules is slow.)
        static = vars(plugin).get(name) if inspect.ismodule(plugin) else inspect.getattr_static(plugin, name, None)
        if not inspect.isroutine(static):
            if static is not None and name in hookspecs.HOOKS:
                raise PluginDefect(f"{name} is a {type(static).__name__}; a hook is a function")
            return None
        options: pluggy.HookimplOpts | None = getattr(static, f"{PROJECT}_impl", None)  # as pluggy's marker leaves it
        if options is None and not inspect.isfunction(static):
            options = super().parse_hookimpl_opts(plugin, name)
        if options is None and name not in hookspecs.HOOKS:
            return None
        function = getattr(plugin, name)
        signature = inspect.signature(function)
        if options is None:
            raise PluginDefect(f"{name}{signature} is not marked with @hookimpl")
        hook = options["specname"] or name
        caller = getattr(self.hook, hook, None)
        specification = None if caller is None else caller.spec
        if specification is None:
            if options["optionalhook"]:
                return options
            close = difflib.get_close_matches(hook, hookspecs.HOOKS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"hooks begin with '{PROJECT}_'"
            raise PluginDefect(f"{name}{signature} implements no hook; {hint}")
        if options["wrapper"] or options["hookwrapper"]:
            raise PluginDefect(f"{name}{signature} is a wrapper; plugins do not wrap each other's hooks")
        if inspect.iscoroutinefunction(function):
            raise PluginDefect(f"{name}{signature} is a coroutine; hooks are called plainly")
        arguments = specification.argnames
        for parameter in signature.parameters.values():
            if parameter.name not in arguments or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                taken = f"the plain argument {', '.join(arguments)}" if arguments else "no argument"
                raise PluginDefect(f"{name}{signature} has {parameter}; {hook} takes {taken}")
            if parameter.default is not parameter.empty:
                reason = f"gives {parameter.name!r} a default; write the plain name, it is always passed"
                raise PluginDefect(f"{name}{signature} {reason}")
        return options

    def implementations(self, hook: str) -> list[pluggy.HookImpl]:
        """Return the implementations of a hook in the order in which they are called: pluggy has the first one last."""
        return [*reversed(getattr(self.hook, hook).get_hookimpls())]

    def call(self, hook: str, implementation: pluggy.HookImpl, arguments: Mapping[str, object]) -> Any:
        """Return what one implementation gives, with lists in place of other iterables, also as values of a mapping:
        all code of the plugin has then run.

        Args:
            hook: Name of the hook.
            implementation: One that is registered under ``DIST:PLUGIN``.
            arguments: Those of the hook; the function is passed what its signature names.

        Raises:
            PluginHookFailed: the function raises or exits. An :class:`NxdtError` passes as it is.
        """
        dist, _, plugin = implementation.plugin_name.partition(":")
        begun, outcome = perf_counter(), "failed"
        try:
            value = implementation.function(*(arguments[name] for name in implementation.argnames))
            value = (
                {name: _listed(each) for name, each in value.items()} if isinstance(value, Mapping) else _listed(value)
            )
            outcome = "none" if value is None else "value"
            return value
        except (NxdtError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise PluginHookFailed(plugin=plugin, dist=dist, hook=hook, reason=describe_failure(error)) from error
        finally:
            seconds = perf_counter() - begun
            self.calls.append(HookCall(hook=hook, plugin=plugin, dist=dist, seconds=seconds, outcome=outcome))


def _listed(value: object) -> object:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)) else value
