"""Entry module of ``nxdt-plugin-lora``: declares the component; torch is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import AdapterComponent, hookimpl


@hookimpl
def nxdt_adapters() -> list[AdapterComponent]:
    """Declare LoRA."""
    return [
        AdapterComponent(
            name="lora",
            target="nxdt_plugin_lora.adapter:LoraAdapter",
            config="nxdt_plugin_lora.config:LoraConfig",
            summary="LoRA and DoRA: trains low-rank updates of linear layers, embeddings and experts",
            aliases=("peft",),
        )
    ]
