"""The place of this process, from the launcher that ``NXDT_LAUNCHER`` names if a plugin provides it.

:func:`nxdt_core.distributed.environment.read_rank_environment` reads the core's own launchers, without plugins. A
plugin's launcher is called only if the variable names it. By naming it, the operator permits the import of the plugin
before any configuration with ``plugins.allow`` has been read.
"""

from __future__ import annotations

import os

from nxdt_core.distributed.environment import LAUNCHER_VARIABLE, OWN_LAUNCHERS, read_rank_environment
from nxdt_core.errors.launch import NotStartedByLauncher
from nxdt_core.kernel import Kernel
from nxdt_core.kernel.plugin import BUILTIN
from nxdt_core.protocols.launcher import Launcher, RankEnvironment


def find_place() -> RankEnvironment:
    """Return the place of this process, and set the usual variables where a plugin's launcher has said it.

    Raises:
        UnknownComponent: ``NXDT_LAUNCHER`` names a launcher that no plugin offers.
        NotStartedByLauncher: it names one that did not start this process.
        NxdtError: variables are missing or contradict each other.
    """
    name = os.environ.get(LAUNCHER_VARIABLE, "")
    if not name or name in OWN_LAUNCHERS or "TORCHELASTIC_RUN_ID" in os.environ:
        return read_rank_environment()
    launcher = Kernel.start().registry.get("launcher", name)
    if launcher.plugin == BUILTIN:
        return read_rank_environment()
    place = launcher.load_class(Launcher)().join(os.environ)
    if place is None:
        raise NotStartedByLauncher(launcher=name)
    if place.world_size > 1:
        place.export()
    return place
