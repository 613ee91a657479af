"""Words and lines of shell scripts that start nxdt."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from nxdt_core import __version__
from nxdt_core.launch.launchers.config import ClusterOptions
from nxdt_core.protocols.launcher import Job

__all__ = ["exports", "header", "program"]


def program(options: ClusterOptions, *, module: bool = False) -> list[str]:
    """Return the words that call nxdt on a node.

    Args:
        options: of the cluster.
        module: as a module behind ``torchrun``, ``-m nxdt_core``.
    """
    if module:
        return ["torchrun", "-m", "nxdt_core"]
    if options.program is not None:
        return shlex.split(options.program)
    return ["nxdt"] if options.image is not None else [sys.executable, "-m", "nxdt_core"]


def header(job: Job) -> list[str]:
    """Return comments that say where a file comes from."""
    return [f"# Written by nxdt {__version__}:", f"#   {job.command_line}"]


def exports(variables: Mapping[str, str]) -> list[str]:
    """Return a line for each variable."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
