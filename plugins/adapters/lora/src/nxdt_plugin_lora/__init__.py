"""Entry module of ``nxdt-plugin-lora``: declares what it has; torch is imported when a run asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nxdt_core.api import AdapterComponent, CliCommand, ConfigFinding, hookimpl

if TYPE_CHECKING:
    from nxdt_core.kernel.hookspecs import ConfigDefaultsContext, ValidateConfigContext


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


@hookimpl
def nxdt_validate_config(context: ValidateConfigContext) -> Iterator[ConfigFinding]:
    """Report a start that decomposes weights which are codes."""
    section = context.config["adapter"]
    if context.components.get("adapter") != "lora:lora" or section["base_dtype"] is None:
        return
    if section["enable_lora"] and section["init_lora_weights"] == "pissa":
        message = f"pissa decomposes the weights themselves, and adapter.base_dtype {section['base_dtype']} keeps codes"
        remedy = "Leave adapter.base_dtype out, or set another init_lora_weights."
        yield ConfigFinding(key="adapter.init_lora_weights", message=message, remedy=remedy)


@hookimpl
def nxdt_config_defaults(context: ConfigDefaultsContext) -> Mapping[str, Any]:
    """Give updates the learning rate of QLoRA's authors (Dettmers et al. 2023, arXiv:2305.14314)."""
    if context.find("model.optim.name") not in (None, "adam", "adamw"):
        return {}
    tuned = context.find("adapter.name") == "lora" and context.find("objective.name") is None
    return {"model": {"optim": {"lr": 2e-4}}} if tuned else {}
