"""A local plugin: the callback ``watch``, which :mod:`accelerator.measurements.watch` implements. No torch here."""

from __future__ import annotations

from nxdt_core.api import Component, hookimpl
from nxdt_core.config.section import Section

__all__ = ["WatchConfig"]


class WatchConfig(Section):
    """What to observe."""

    after: int
    """Step after which the remaining ones are observed."""
    trace: str
    """File to write their trace to, compressed."""


@hookimpl
def nxdt_callbacks() -> list[Component]:
    """Declare the callback."""
    config = f"{__name__}:WatchConfig"
    return [Component(name="watch", target="accelerator.measurements.watch:Watch", config=config)]
