"""The section ``plugins``, read before all others: it decides which code may run at all."""

from __future__ import annotations

from collections.abc import Iterator

from nxdt_core.config.resolve.bind import read_part
from nxdt_core.config.resolve.interpolation import interpolate
from nxdt_core.config.resolve.path_values import Locator
from nxdt_core.config.schema.selectors import PluginsConfig
from nxdt_core.config.sources.node import Node, Origin
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import BadComponentChoice, ComponentFinding, ConfigProblem
from nxdt_core.errors.plugins import LocalPluginMissing
from nxdt_core.kernel import Kernel, PluginPolicy
from nxdt_core.kernel.plugin import LOCAL

__all__ = ["read_policy", "start_kernel", "unusable_files"]


def read_policy(tree: Node, locator: Locator) -> PluginPolicy | list[ConfigProblem]:
    """Return the policy, or what is wrong with the section: no plugin is imported under a policy that was not
    understood."""
    resolved, problems = interpolate(tree, wanted=("plugins",))
    section = resolved.find("plugins")
    if section is None or section.value is None:
        return problems or PluginPolicy()
    read, wrong = read_part(PluginsConfig, section, "plugins", locator)
    if problems or wrong:
        return [*problems, *wrong]
    return PluginPolicy(
        allow=read.allow,
        block=read.block,
        schemes=read.schemes,
        prefer=read.prefer,
        local=read.local,
        lock=read.lock,
    )


def start_kernel(policy: PluginPolicy, tree: Node) -> Kernel | ConfigProblem:
    """Return the kernel under ``policy``, or the reason why it does not start, at the key that is at fault."""
    try:
        return Kernel.start(policy)
    except NxdtError as error:
        key = "plugins.local" if isinstance(error, LocalPluginMissing) else "plugins.lock"
        return BadComponentChoice(**_origin(tree, key).at(key), error=error)


def unusable_files(kernel: Kernel, tree: Node) -> Iterator[ConfigProblem]:
    """Yield the files of ``plugins.local`` that do not load: they were asked for by name, unlike what is merely
    installed."""
    key = "plugins.local"
    for plugin in kernel.plugins:
        if plugin.dist == LOCAL and plugin.state not in ("ok", "blocked"):
            yield ComponentFinding(
                **_origin(tree, key).at(key),
                message=f"the plugin file {plugin.location} is {plugin.state}: {plugin.reason}.",
                advice="Name one of the two."
                if plugin.state == "shadowed"
                else "Correct it, or take it out of plugins.local.",
            )


def _origin(tree: Node, key: str) -> Origin:
    """Where ``key`` was written, else the section ``plugins``."""
    node = tree.find(key) or tree.find("plugins")
    return node.origin if node is not None else Origin(kind="default", where="")
