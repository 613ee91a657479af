"""Entry module of ``nxdt-plugin-ray``: declares the launcher."""

from __future__ import annotations

from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_launchers() -> list[Component]:
    """Declare the launcher of Ray clusters."""
    return [
        Component(
            name="ray",
            target="nxdt_plugin_ray.driver:RayLauncher",
            config="nxdt_plugin_ray.config:RayOptions",
            summary="write a driver for Ray, with an actor per node in a placement group",
        )
    ]
