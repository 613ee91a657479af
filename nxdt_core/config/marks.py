"""Old name of :mod:`nxdt_core.config.annotations`."""

from nxdt_core.config.annotations import *  # noqa: F403
from nxdt_core.deprecation import deprecated_module

deprecated_module("nxdt_core.config.marks", use="nxdt_core.config.annotations", since="0.1", goes="0.3")
