"""Entry module of ``nxdt-plugin-sft-chat``: declares the component; the loader is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import DataloaderComponent, hookimpl


@hookimpl
def nxdt_dataloaders() -> list[DataloaderComponent]:
    """Declare the loader of conversations."""
    return [
        DataloaderComponent(
            name="sft-chat",
            target="nxdt_plugin_sft_chat.loader:ChatDataloader",
            config="nxdt_plugin_sft_chat.config:ChatConfig",
            summary="conversations through a chat template, the loss on the answers, packed or padded",
        )
    ]
