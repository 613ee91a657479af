"""Old name of :mod:`nxdt_core.config.annotations`."""

import warnings

from nxdt_core.config.annotations import *  # noqa: F403

warnings.warn("nxdt_core.config.marks is now nxdt_core.config.annotations", DeprecationWarning, stacklevel=2)
