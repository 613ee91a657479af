"""A plugin file that describes the device type of ``abacus.cpp``."""

import sys
from pathlib import Path

from nxdt_core.api import Component, hookimpl

sys.path.append(str(Path(__file__).parents[2]))


@hookimpl
def nxdt_devices():
    """Declare the profile."""
    return [Component(name="abacus", target="tests.distributed.abacus:PROFILE", summary="a device of tests")]
