"""Entry module of ``nxdt-plugin-text``: declares the component; the loader is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import DataloaderComponent, hookimpl


@hookimpl
def nxdt_dataloaders() -> list[DataloaderComponent]:
    """Declare the loader of plain text and JSONL."""
    return [
        DataloaderComponent(
            name="text",
            target="nxdt_plugin_text.loader:TextDataloader",
            config="nxdt_plugin_text.config:TextConfig",
            summary="plain text or JSONL files, tokenised and packed on the fly",
        )
    ]
