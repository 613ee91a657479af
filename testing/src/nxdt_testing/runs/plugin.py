"""The plugin file of :mod:`nxdt_testing.runs.small_run`: numbers to learn. No torch here."""

from __future__ import annotations

from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Return a source of made-up tokens."""
    return [
        Component(name="contract-tokens", target="nxdt_testing.runs.tokens:Tokens", summary="made-up tokens, for tests")
    ]
