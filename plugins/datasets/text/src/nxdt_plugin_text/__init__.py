"""Entry module of ``nxdt-plugin-text``: declares the component; the loader is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Declare the loader of plain text and JSONL."""
    return [
        Component(
            name="text",
            target="nxdt_plugin_text.loader:TextData",
            config="nxdt_plugin_text.config:TextConfig",
            summary="plain text or JSONL files, tokenised and packed on the fly",
        )
    ]
