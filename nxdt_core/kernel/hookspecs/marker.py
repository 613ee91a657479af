"""The decorator of hook specifications."""

from __future__ import annotations

import pluggy

from nxdt_core.api import PROJECT

__all__ = ["hookspec"]

hookspec = pluggy.HookspecMarker(PROJECT)
