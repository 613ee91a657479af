"""The section ``plugins``, read before all others: it decides which code may run at all."""

from __future__ import annotations

from typing import Any

from nxdt_core.config.interpolation import interpolate
from nxdt_core.config.location import Locator
from nxdt_core.config.node import Node, Origin
from nxdt_core.config.reading import read_part
from nxdt_core.config.schema.selectors import PluginsConfig
from nxdt_core.errors import BadComponentChoice, ConfigProblem, LocalPluginMissing, NxdtError
from nxdt_core.kernel import Kernel, PluginPolicy

__all__ = ["read_policy", "start_kernel"]


def read_policy(tree: Node, locator: Locator) -> PluginPolicy | list[ConfigProblem]:
    """The policy, or what is wrong with the section: no plugin is imported under a policy that was not understood."""
    resolved, problems = interpolate(tree, wanted=("plugins",))
    section = resolved.find("plugins")
    if section is None or section.value is None:
        return problems or PluginPolicy()
    read, wrong = read_part(PluginsConfig, section, "plugins", locator)
    if problems or wrong:
        return [*problems, *wrong]
    return PluginPolicy(allow=read.allow, block=read.block, prefer=read.prefer, local=read.local, lock=read.lock)


def start_kernel(policy: PluginPolicy, tree: Node) -> Kernel | ConfigProblem:
    """The kernel under ``policy``, or the reason why it does not start, at the key that is at fault."""
    try:
        return Kernel.start(policy)
    except NxdtError as error:
        key = "plugins.local" if isinstance(error, LocalPluginMissing) else "plugins.lock"
        node: Any = tree.find(key) or tree.find("plugins") or Node(None, Origin(kind="default", where=""))
        return BadComponentChoice(**node.origin.at(key), error=error)
