"""Entry module of ``nxdt-plugin-sft-chat``: declares the component; the loader is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Declare the loader of conversations."""
    return [
        Component(
            name="sft-chat",
            target="nxdt_plugin_sft_chat.loader:ChatData",
            config="nxdt_plugin_sft_chat.config:ChatConfig",
            summary="conversations through a chat template, the loss on the answers, packed or padded",
        )
    ]
