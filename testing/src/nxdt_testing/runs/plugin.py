"""The plugin file of :mod:`nxdt_testing.runs.small_run`: numbers to learn. No torch here."""

from __future__ import annotations

from nxdt_core.api import DataloaderComponent, hookimpl


@hookimpl
def nxdt_dataloaders() -> list[DataloaderComponent]:
    """Return a source of made-up tokens."""
    return [
        DataloaderComponent(
            name="contract-tokens", target="nxdt_testing.runs.tokens:Tokens", summary="made-up tokens, for tests"
        )
    ]
