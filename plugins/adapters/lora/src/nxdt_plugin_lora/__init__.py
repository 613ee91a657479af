"""Entry module of ``nxdt-plugin-lora``: declares what it has; torch is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import AdapterComponent, CliCommand, hookimpl


@hookimpl
def nxdt_adapters() -> list[AdapterComponent]:
    """Declare LoRA."""
    return [
        AdapterComponent(
            name="lora",
            target="nxdt_plugin_lora.adapter:LoraAdapter",
            config="nxdt_plugin_lora.config:LoraConfig",
            requires_of_model=frozenset({"lora"}),
            summary="LoRA and DoRA: trains low-rank updates of linear layers, embeddings and experts",
        )
    ]


@hookimpl
def nxdt_cli() -> list[CliCommand]:
    """Declare what turns a LoRA run's checkpoints into other forms."""
    return [
        CliCommand(
            name="checkpoint merge-lora",
            target="nxdt_plugin_lora.commands:merge_lora",
            summary="Merge the LoRA adapter of a checkpoint into its base.",
        ),
        CliCommand(
            name="checkpoint export-lora",
            target="nxdt_plugin_lora.commands:export_lora",
            summary="Write the LoRA adapter of a checkpoint as a directory that peft loads.",
        ),
    ]
