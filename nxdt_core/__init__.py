"""nxdt: training of large language models from swappable parts.

Importing this package starts nothing: no plugin is loaded, no device is asked, torch is not imported.
Plugins import :mod:`nxdt_core.api`; users run ``nxdt`` or import :mod:`nxdt_core.train`.
"""

from nxdt_core._version import __version__

__all__ = ["__version__"]
