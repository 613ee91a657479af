"""The kernel: finds plugins and knows what they offer. It knows nothing of models, data or stores.

Nothing happens at import; :meth:`Kernel.start` does the work and returns an object that is passed around.
"""

from __future__ import annotations

from nxdt_core.kernel.manager import Kernel
from nxdt_core.kernel.plugin import PluginInfo, PluginPolicy, PluginState
from nxdt_core.kernel.registry import RegisteredComponent, Registry

__all__ = ["Kernel", "PluginInfo", "PluginPolicy", "PluginState", "RegisteredComponent", "Registry"]
