"""The typed facade of the hooks: one method for each specification, under the specification's name.

The registration hooks of the kinds differ in their records alone and share :meth:`Hooks.components`. Registration
hooks are called by the kernel alone, when it starts; the registry holds what they gave. The others are called by the
configuration, the training path and the checkpoints, with one frozen context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nxdt_core.kernel.hooks.calls import HookCalls, HookResult, Implementation

if TYPE_CHECKING:
    from nxdt_core import api
    from nxdt_core.kernel import contexts

__all__ = ["Hooks"]


class Hooks:
    """All hooks of a started kernel.

    Example::

        for result in kernel.hooks.nxdt_validate_config(context):
            for finding in result.value:
                print(result.plugin, finding.key, finding.message)
    """

    __slots__ = ("_calls",)

    def __init__(self, by_hook: Mapping[str, tuple[Implementation, ...]]) -> None:
        self._calls = HookCalls(by_hook)

    def implementations(self, hook: str) -> tuple[Implementation, ...]:
        """Return who implements ``hook``, in calling order."""
        return self._calls.implementations(hook)

    # Registration

    def components(self, kind: api.Kind) -> tuple[HookResult[Iterable[api.Component]], ...]:
        """Call the registration hook of a kind and return the records that plugins offer."""
        return tuple(self._calls.collect(kind.hook))

    def nxdt_kinds(self) -> tuple[HookResult[Iterable[api.Kind]], ...]:
        """Return the kinds that plugins add."""
        return tuple(self._calls.collect("nxdt_kinds"))

    def nxdt_components(self) -> tuple[HookResult[Mapping[str, Iterable[api.Component]]], ...]:
        """Return the records by name of a kind that a plugin added."""
        return tuple(self._calls.collect("nxdt_components"))

    def nxdt_cli(self) -> tuple[HookResult[Iterable[api.CliCommand]], ...]:
        """Return the commands that plugins add."""
        return tuple(self._calls.collect("nxdt_cli"))

    # Configuration: a failure stops with PluginHookFailed

    def nxdt_config_defaults(
        self, context: contexts.ConfigDefaultsContext
    ) -> tuple[HookResult[Mapping[str, Any]], ...]:
        """Return the nested trees of defaults."""
        return tuple(self._calls.collect("nxdt_config_defaults", context))

    def nxdt_validate_config(
        self, context: contexts.ValidateConfigContext
    ) -> tuple[HookResult[Iterable[api.ConfigFinding]], ...]:
        """Return the problems that plugins find."""
        return tuple(self._calls.collect("nxdt_validate_config", context))
