"""Starts the kernel: finds plugins, imports their light modules, asks what they offer, and registers it.

Digests are imported where they are asked for: every command starts a kernel, few compare files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import final

from nxdt_core import __version__
from nxdt_core.api import KINDS
from nxdt_core.errors.plugins import PluginsUnusable
from nxdt_core.kernel.components.registry import Registry
from nxdt_core.kernel.discovery.installed import find_plugins
from nxdt_core.kernel.discovery.local_files import find_local_plugins
from nxdt_core.kernel.doctor import advise, diagnose
from nxdt_core.kernel.hooks.facade import Hooks
from nxdt_core.kernel.hooks.table import order_hooks
from nxdt_core.kernel.plugin import BUILTIN, PluginInfo
from nxdt_core.kernel.policy import PluginPolicy, names
from nxdt_core.kernel.roster import Roster

__all__ = ["Kernel"]


@final
class Kernel:
    """A set of plugins that was found, checked and registered; passed as an argument, never global.

    Example::

        kernel = Kernel.start(PluginPolicy(block=("nxdt-plugin-experimental",)))
        builder = kernel.registry.get("model", "llama").load_target()
    """

    __slots__ = ("_identities", "hooks", "plugins", "policy", "registry")

    def __init__(
        self, *, plugins: tuple[PluginInfo, ...], registry: Registry, hooks: Hooks, policy: PluginPolicy
    ) -> None:
        self.plugins = plugins
        """The built-ins, then the installed ones by distribution and entry point, then local files."""
        self.registry = registry
        self.hooks = hooks
        self.policy = policy
        self._identities: dict[str, str] | None = None

    @classmethod
    def start(
        cls, policy: PluginPolicy | None = None, *, strict: bool = False, path: Sequence[str] | None = None
    ) -> Kernel:
        """Discover, judge, import and register. A plugin that cannot be used is kept, with its state and reason.

        Args:
            policy: What may be loaded; everything by default.
            strict: For tests and CI: an unusable plugin is an error, and so is an entry module that imports torch.
            path: Directories whose distributions are looked at; ``sys.path`` by default.

        Raises:
            LocalPluginMissing: a file of ``policy.local`` does not exist.
            PluginLockMismatch: the plugins are not those of ``policy.lock``; none was imported.
            PluginsUnusable: in strict mode, a plugin is incompatible, broken, shadowed or corrupt.
        """
        policy = policy or PluginPolicy()
        found = [_builtin(), *find_plugins(policy, path), *find_local_plugins(policy)]
        if policy.lock is not None:
            from nxdt_core.kernel.integrity.lock import compare_with_lock

            compare_with_lock(found, policy.lock)
        roster = Roster(found)
        with redirect_stdout(sys.stderr):  # a module that prints must not spoil the output of --json
            roster.import_all(strict=strict)
            roster.declare_all()
        plugins = tuple(roster.plugins)
        if strict:
            _refuse_unusable(plugins)
        registry = Registry(
            kinds=(*KINDS, *roster.added_kinds().values()),
            components=roster.components(),
            plugins=plugins,
            prefer=policy.prefer,
            schemes=policy.schemes,
        )
        return cls(plugins=plugins, registry=registry, hooks=Hooks(order_hooks(roster.registered())), policy=policy)

    def fingerprint(self) -> str:
        """Digest of the usable plugins and their files, equal on every rank that may train together."""
        from nxdt_core.kernel.integrity.fingerprint import fingerprint

        return fingerprint(self.identities())

    def identities(self) -> Mapping[str, str]:
        """Return distribution, version and digest of the files of each usable plugin, by its name."""
        if self._identities is None:
            from nxdt_core.kernel.integrity.fingerprint import identify_plugins

            self._identities = identify_plugins(self.plugins)
        return self._identities

    def unmatched_policy(self) -> tuple[str, ...]:
        """Return the entries of the policy that name no plugin that was found: often misspelt, so worth a warning."""
        return tuple(
            entry
            for entry in self.policy.entries()
            if not any(names(entry, name=plugin.name, dist=plugin.dist) for plugin in self.plugins)
        )


def _builtin() -> PluginInfo:
    """The core's own components, as a plugin like any other. (Named by text: they are on the level of plugins.)"""
    root = Path(__file__).parent.parent.parent
    return PluginInfo(
        name=BUILTIN, dist="nxdt-core", version=__version__, module="nxdt_core.builtins", location=str(root)
    )


def _refuse_unusable(plugins: Sequence[PluginInfo]) -> None:
    problems = [f"{diagnose(p)} ({advise(p)})" for p in plugins if p.state not in ("ok", "blocked")]
    if problems:
        raise PluginsUnusable(problems=tuple(problems))
